"""Block hashes: equal to megatron-core's, safe to unpack, and what a hit is worth."""

import array
import hashlib
import random
from types import SimpleNamespace

import builders  # noqa: F401 (loads the hypothesis profile)
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.inference_request import (
    DynamicInferenceRequest,
    compute_block_hashes_batched,
)

from megatron.core.inference.coordinator.hashing import (
    block_hashes,
    checked_hashes,
    expected_skip,
    masked,
    pack_hashes,
    packed_block_hashes,
)
from megatron.core.inference.coordinator.runtime import text

LARGEST = 2**63 - 1
TOKEN = st.integers(0, 2**31 - 1)
BLOCK_SIZES = st.sampled_from([1, 2, 3, 16, 64])


def megatrons(prompt, block_size):
    return compute_block_hashes_batched(torch.tensor(list(prompt), dtype=torch.int64), block_size)


# --- hashing -------------------------------------------------------------------------------------


@given(st.lists(TOKEN, max_size=200), BLOCK_SIZES)
def test_hashes_equal_megatron_cores(prompt, block_size):
    assert block_hashes(prompt, block_size) == megatrons(prompt, block_size)


@given(
    hnp.arrays(
        st.sampled_from([np.int32, np.int64, np.uint16, np.dtype(">i4")]), st.integers(0, 99)
    ),
    BLOCK_SIZES,
)
def test_hashes_of_an_array_of_any_integers_equal_those_of_the_list(prompt, block_size):
    assert block_hashes(prompt, block_size) == megatrons(prompt.tolist(), block_size)


def test_an_array_need_not_be_contiguous():
    assert block_hashes(np.arange(40)[::2], 4) == block_hashes(list(range(0, 40, 2)), 4)


@pytest.mark.parametrize("kind", [tuple, np.array, torch.tensor, lambda it: array.array("q", it)])
def test_a_prompt_need_not_be_a_list(kind):
    assert block_hashes(kind([1, 2, 3]), 2) == block_hashes([1, 2, 3], 2)
    assert block_hashes(kind([1, 2, 3]), 4) == []


def test_the_list_of_tokens_may_hold_numpys_integers():
    assert block_hashes(list(np.arange(8)), 4) == block_hashes(list(range(8)), 4)


@given(st.lists(TOKEN, max_size=200), BLOCK_SIZES)
def test_packed_hashes_are_the_hashes(prompt, block_size):
    packed = packed_block_hashes(prompt, block_size)
    assert type(packed) is bytes
    assert packed == pack_hashes(block_hashes(prompt, block_size))
    assert all(type(value) is int for value in block_hashes(prompt, block_size))


def test_a_token_that_is_no_int64_is_refused():
    for token in (2**63, -(2**63) - 1):
        with pytest.raises(OverflowError):
            block_hashes([1, token], 2)


@pytest.mark.parametrize(
    ("word", "value"),
    [(0, 1), (1, 2), (LARGEST - 1, LARGEST), (LARGEST, 1), (2**63, 2), (2**64 - 1, 2)],
)
def test_every_digest_gives_a_hash_from_1_to_the_largest(word, value, monkeypatch):
    """No prompt is known whose digest begins so."""
    digest = word.to_bytes(8, "little") + bytes(24)
    chain = SimpleNamespace(digest=lambda: digest)
    monkeypatch.setattr(hashlib, "sha256", lambda data: chain)
    assert block_hashes([5], 1) == megatrons([5], 1) == [value]


@pytest.mark.parametrize("length", [0, 1, 15])
def test_without_a_full_block_there_is_no_hash(length):
    assert block_hashes([7] * length, 16) == megatrons([7] * length, 16) == []


@pytest.mark.parametrize(("length", "count"), [(16, 1), (17, 1), (31, 1), (32, 2)])
def test_only_full_blocks_are_hashed(length, count):
    hashes = block_hashes(list(range(length)), 16)
    assert len(hashes) == count
    assert hashes == megatrons(range(length), 16)


def test_a_known_value():
    """SHA-256 of 32 zero bytes and the tokens 0 to 3 as little-endian int64, by the definition."""
    block = b"".join(token.to_bytes(8, "little") for token in range(4))
    first = hashlib.sha256(bytes(32) + block).digest()
    second = hashlib.sha256(first + block).digest()
    expected = [int.from_bytes(d[:8], "little") % (2**63 - 1) + 1 for d in (first, second)]
    assert block_hashes([0, 1, 2, 3, 0, 1, 2, 3], 4) == expected


def test_equal_blocks_behind_different_prefixes_differ():
    one, two = block_hashes([1, 9, 9], 1), block_hashes([2, 9, 9], 1)
    assert len({*one, *two}) == 6
    assert block_hashes([1, 9, 5], 1)[:2] == one[:2]


@given(st.lists(TOKEN, max_size=200), st.integers(1, 5), st.integers(0, 2**63 - 1))
def test_salted_hashes_are_the_hashes_under_a_mask_and_back(prompt, block_size, salt):
    plain = block_hashes(prompt, block_size)
    salted = np.frombuffer(packed_block_hashes(prompt, block_size, salt), "<i8").tolist()
    assert salted == masked(plain, salt)
    assert masked(salted, salt) == plain
    assert all(0 < each < 2**63 for each in salted)


def test_the_hash_that_equals_the_salt_stays_itself():
    (plain,) = block_hashes([1], 1)
    assert packed_block_hashes([1], 1, plain) == pack_hashes([plain])


# --- text ----------------------------------------------------------------------------------------


class Letters:
    """A tokenizer: a token per letter; `bos` stands for `^`."""

    bos = 1

    def tokenize(self, prompt):
        return [1 if letter == "^" else ord(letter) for letter in prompt]


@pytest.mark.parametrize(
    ("prompt", "add_bos", "tokens"),
    [
        ("abc", False, [97, 98, 99]),
        ("abc", True, [1, 97, 98, 99]),
        ("^abc", True, [1, 97, 98, 99]),
        ("^^abc", False, [97, 98, 99]),
        ("", True, [1]),
        ("", False, []),
    ],
)
def test_text_is_hashed_as_the_engine_tokenizes_it(prompt, add_bos, tokens):
    assert text.tokenize(Letters(), prompt, add_bos) == tokens
    assert block_hashes(text.tokenize(Letters(), prompt, add_bos), 2) == megatrons(tokens, 2)


# --- packing -------------------------------------------------------------------------------------

HASHES = st.lists(st.integers(1, LARGEST), unique=True, max_size=200)
"""Long enough for both ways to look for duplicates."""


@given(HASHES)
def test_packed_hashes_are_taken_as_they_are(hashes):
    packed = pack_hashes(hashes)
    assert len(packed) == 8 * len(hashes)
    assert checked_hashes(packed, len(hashes)) is packed
    assert checked_hashes(packed, None) is packed


@pytest.mark.parametrize("kind", [bytearray, memoryview, lambda it: np.frombuffer(it, "<i8")])
@pytest.mark.parametrize("count", [3, 300])
def test_a_frame_may_be_anything_that_bytes_takes(kind, count):
    packed = pack_hashes(range(1, count + 1))
    taken = checked_hashes(kind(packed), count)
    assert type(taken) is bytes
    assert taken == packed


def test_packed_hashes_are_little_endian():
    assert pack_hashes([1, LARGEST]) == b"\1" + bytes(7) + b"\xff" * 7 + b"\x7f"


@given(st.lists(TOKEN, max_size=100), BLOCK_SIZES)
def test_the_hashes_of_every_prompt_are_taken(prompt, block_size):
    packed = packed_block_hashes(prompt, block_size)
    assert checked_hashes(packed, len(prompt) // block_size) == packed


@pytest.mark.parametrize(
    ("packed", "full_blocks"),
    [
        (pack_hashes([5, 6]), 1),
        (pack_hashes([5, 6]), 3),
        (b"", 1),
        (pack_hashes([5]), 0),
        (pack_hashes([5, 6])[:15], 2),
        (pack_hashes([5, 6]) + b"x", None),
        (pack_hashes([5, 5]), 2),
        (pack_hashes([0]), 1),
        (pack_hashes([-1]), 1),
        (pack_hashes([-(2**63)]), None),
    ],
)
def test_lists_that_cannot_be_right_are_refused(packed, full_blocks):
    assert checked_hashes(packed, full_blocks) is None


@pytest.mark.parametrize("length", [2, 16, 63, 64, 65, 66, 2048])
@pytest.mark.parametrize("wrong", [0, -1, -(2**63), None])
def test_one_wrong_hash_among_many_is_found_wherever_it_stands(length, wrong):
    source = random.Random(length)
    hashes = [source.randrange(1, 2**63) for _ in range(length)]
    assert checked_hashes(pack_hashes(hashes), length) is not None
    for place in {0, 1, length // 2, length - 1}:
        value = hashes[place - 1] if wrong is None else wrong  # None: a duplicate
        bad = [*hashes[:place], value, *hashes[place + 1 :]]
        assert checked_hashes(pack_hashes(bad), length) is None


@given(
    st.binary(max_size=64) | st.lists(st.integers(-3, 400), max_size=120).map(pack_hashes),
    st.none() | st.integers(0, 8),
)
def test_any_bytes_give_a_sound_list_or_none(packed, full_blocks):
    hashes = np.frombuffer(packed[: len(packed) // 8 * 8], "<i8").tolist()
    sound = (
        len(packed) % 8 == 0
        and all(1 <= value <= LARGEST for value in hashes)
        and len(set(hashes)) == len(hashes)
        and full_blocks in (None, len(hashes))
    )
    assert checked_hashes(packed, full_blocks) == (packed if sound else None)


# --- what a hit is worth -------------------------------------------------------------------------

SIZES = [
    (n, held, size) for size in range(1, 6) for n in range(24) for held in range(n // size + 1)
]


def test_the_engine_skips_the_most_blocks_that_leave_it_2_tokens_to_compute():
    for prompt_tokens, held, size in SIZES:
        possible = [k * size for k in range(held + 1) if prompt_tokens - k * size >= 2]
        assert expected_skip(prompt_tokens, held, size) == max(possible, default=0)


def test_the_engine_itself_skips_what_is_expected():
    for prompt_tokens, held, size in SIZES:
        if prompt_tokens == 0:
            continue  # the engine takes no empty prompt
        request = DynamicInferenceRequest(
            request_id=0,
            prompt_tokens=torch.arange(prompt_tokens),
            block_size_tokens=size,
            enable_prefix_caching=True,
        )
        cached = {h: i for i, h in enumerate(request.precomputed_block_hashes[:held])}
        context = SimpleNamespace(
            block_size_tokens=size,
            enable_prefix_caching=True,
            is_hybrid_model=False,
            kv_block_allocator=SimpleNamespace(kv_hash_to_block_id=cached),
        )
        context._find_kv_match_count = lambda *args, it=context: (
            DynamicInferenceContext._find_kv_match_count(it, *args)
        )
        match = DynamicInferenceContext._compute_prefix_match(context, request, prompt_tokens)
        assert match[4] == expected_skip(prompt_tokens, held, size), (prompt_tokens, held, size)
