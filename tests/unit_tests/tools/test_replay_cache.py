"""tools/replay: the block cache against one kept block by block, and the loose one."""

import random
import sys
from hashlib import sha256
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from replay.cache import BlockCache
from replay.loose_cache import LooseCache


def chain(text):
    """Packed hashes of blocks named by letters; as in any chain, each stands for all before it."""
    return b"".join(block(text[: n + 1]) for n in range(len(text)))


def block(prefix):
    return sha256(prefix.encode()).digest()[:7] + prefix[-1].encode()


def keep(cache, text, clock):
    """A request comes, computes what is missing and goes; returns the blocks that were there."""
    hashes = chain(text)
    node, there = cache.acquire(hashes, clock)
    missing = (len(hashes) - there) // 8
    assert cache.take(missing)
    node, _ = cache.extend(node, hashes, there, len(hashes), clock)
    cache.release(node)
    cache.check_integrity()
    return there // 8


def names(removed):
    return [tail[7::8].decode() for tail in removed]


def test_a_prompt_that_goes_on_finds_what_was_kept():
    cache = BlockCache(10)
    assert [keep(cache, text, n) for n, text in enumerate(["ABC", "ABCDE", "ABX", "Q"])] == [
        0, 3, 2, 0,
    ]  # fmt: skip
    assert [cache.depth(chain(text)) for text in ("ABCDE", "ABXY", "QA", "Z")] == [5, 3, 1, 0]
    assert (cache.free, cache.idle) == (3, 7)


def test_the_engines_own_example_of_leaf_first_eviction():
    cache = BlockCache(6)
    for clock, text in [(1, "ABC"), (2, "AB"), (3, "ABF"), (3, "AD"), (5, "ADE"), (5, "ABC")]:
        keep(cache, text, clock)
    # F is the oldest leaf; then C of the two used at 5, or E: the one that became a leaf first
    assert cache.take(1)
    assert names(cache.removed) == ["F"]


def test_only_what_nobody_uses_is_given_up_from_the_end():
    cache = BlockCache(6)
    keep(cache, "ABCD", 1)
    node, there = cache.acquire(chain("AB"), 2)
    assert there == 16
    assert not cache.take(5)
    assert cache.take(3)
    assert names(cache.removed) == ["D"]
    assert cache.take(1)
    assert names(cache.removed) == ["D", "C"]
    assert not cache.take(1)
    cache.release(node)
    assert cache.take(1)
    assert cache.depth(chain("ABCD")) == 1


def test_with_ref_zero_blocks_go_with_their_last_user():
    cache = BlockCache(9, keeps=False)
    hashes = chain("ABC")
    node, _ = cache.acquire(hashes, 1)
    assert cache.take(3)
    node, _ = cache.extend(node, hashes, 0, 24, 1)
    other, there = cache.acquire(chain("AB"), 2)
    assert there == 16
    cache.release(node)
    assert (names(cache.removed), cache.free) == (["C"], 7)
    cache.release(other)
    assert (names(cache.removed), cache.free, cache.idle) == (["C", "AB"], 9, 0)


def test_what_somebody_else_computed_in_the_meantime_is_not_stored_twice():
    cache = BlockCache(20)
    hashes = chain("ABCD")
    first, _ = cache.acquire(hashes, 1)
    second, _ = cache.acquire(hashes, 1)
    assert cache.take(8)
    first, new = cache.extend(first, hashes, 0, 16, 1)
    assert new == 0
    second, new = cache.extend(second, hashes, 0, 32, 1)
    assert new == 16
    for node in (first, second):
        cache.release(node)
    cache.check_integrity()
    assert cache.idle == 4


class BlockByBlock:
    """The same cache, slowly: every block with its own clock."""

    def __init__(self, blocks):
        self.room = blocks
        self.used = {}  # prefix -> clock

    def keep(self, text, clock):
        prefixes = [text[: n + 1] for n in range(len(text))]
        there = sum(prefix in self.used for prefix in prefixes)
        for prefix in prefixes[:there]:
            self.used[prefix] = clock
        while len(self.used) + len(prefixes) - there > self.room:
            leaves = [p for p in self.used if not any(q[:-1] == p for q in self.used)]
            free = [p for p in leaves if p not in prefixes[:there]]
            del self.used[min(free, key=self.used.__getitem__)]
        self.used |= dict.fromkeys(prefixes, clock)
        return there


@pytest.mark.parametrize("seed", range(20))
def test_it_keeps_the_blocks_that_a_cache_kept_block_by_block_keeps(seed):
    draw = random.Random(seed)
    cache, slow = BlockCache(12), BlockByBlock(12)
    for clock in range(1, 150):
        text = "".join(draw.choice("AB") for _ in range(draw.randint(1, 7)))
        assert keep(cache, text, clock) == slow.keep(text, clock)
        assert cache.idle == len(slow.used)
        assert cache.free + cache.idle == 12


# --- a cache that running requests do not hold on to -------------------------------------------


def test_a_loose_cache_gives_up_what_is_used_longest_ago_also_while_it_is_used():
    cache = LooseCache(6)
    node, there = cache.acquire(chain("ABCD"), 1)
    assert cache.take(4)
    node, _ = cache.extend(node, chain("ABCD"), there, 32, 1)
    keep(cache, "XYZ", 2)
    assert names(cache.removed) == ["D"]
    assert [cache.depth(chain(text)) for text in ("ABCD", "XYZ")] == [3, 3]
    cache.release(node)
    cache.give(0)
    cache.check_integrity()


def test_in_a_loose_cache_what_a_request_computes_is_stored_with_what_it_was_computed_from():
    cache = LooseCache(6)
    node, _ = cache.acquire(chain("ABCD"), 1)
    assert cache.take(4)
    node, new = cache.extend(node, chain("ABCD"), 0, 16, 1)
    assert new == 0
    keep(cache, "UVWXYZ", 2)  # takes everything
    assert cache.depth(chain("AB")) == 0
    node, new = cache.extend(node, chain("ABCD"), 16, 32, 3)
    assert (new, cache.depth(chain("ABCD"))) == (0, 4)
    cache.check_integrity()


def test_a_loose_cache_takes_what_is_too_large_for_it_and_makes_up_for_it_later():
    cache = LooseCache(2)
    assert keep(cache, "ABCDE", 1) == 0
    assert cache.free == -3
    assert keep(cache, "XY", 2) == 0
    assert (cache.depth(chain("ABCDE")), cache.depth(chain("XY")), cache.free) == (0, 2, 0)


@pytest.mark.parametrize("seed", range(10))
def test_a_loose_cache_holds_the_prompts_used_last(seed):
    """As a list of blocks by last use, of which those used last stay."""
    rng = random.Random(seed)
    cache, used = LooseCache(40), {}
    for clock in range(300):
        text = "".join(rng.choice("AB") for _ in range(rng.randint(1, 12)))
        keep(cache, text, clock)
        used |= {text[:n]: (clock, -n) for n in range(1, len(text) + 1)}
        used = dict(sorted(used.items(), key=lambda item: item[1])[-40:])
        held = {prefix for prefix in used if cache.depth(chain(prefix)) == len(prefix)}
        assert held == used.keys()
        assert cache.free == 40 - len(used)
