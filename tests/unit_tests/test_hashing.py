"""Block hashes: equal to megatron-core's, safe to unpack, and what a hit is worth."""

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
    expected_skip,
    pack_hashes,
    unpack_hashes,
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


def test_a_tuple_and_a_tensor_are_prompts_too():
    assert block_hashes((1, 2, 3), 2) == block_hashes([1, 2, 3], 2)
    assert block_hashes(torch.tensor([1, 2, 3]), 2) == block_hashes([1, 2, 3], 2)


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
    import hashlib

    block = b"".join(token.to_bytes(8, "little") for token in range(4))
    first = hashlib.sha256(bytes(32) + block).digest()
    second = hashlib.sha256(first + block).digest()
    expected = [int.from_bytes(d[:8], "little") % (2**63 - 1) + 1 for d in (first, second)]
    assert block_hashes([0, 1, 2, 3, 0, 1, 2, 3], 4) == expected


def test_equal_blocks_behind_different_prefixes_differ():
    one, two = block_hashes([1, 9, 9], 1), block_hashes([2, 9, 9], 1)
    assert len({*one, *two}) == 6
    assert block_hashes([1, 9, 5], 1)[:2] == one[:2]


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

HASHES = st.lists(st.integers(1, LARGEST), unique=True, max_size=50)


@given(HASHES)
def test_packed_hashes_come_back(hashes):
    packed = pack_hashes(hashes)
    assert len(packed) == 8 * len(hashes)
    assert unpack_hashes(packed, len(hashes)) == hashes
    assert unpack_hashes(packed, None) == hashes


def test_packed_hashes_are_little_endian():
    assert pack_hashes([1, LARGEST]) == b"\1" + bytes(7) + b"\xff" * 7 + b"\x7f"


@given(st.lists(TOKEN, max_size=100), BLOCK_SIZES)
def test_the_hashes_of_every_prompt_are_taken(prompt, block_size):
    hashes = block_hashes(prompt, block_size)
    assert unpack_hashes(pack_hashes(hashes), len(prompt) // block_size) == hashes


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
    assert unpack_hashes(packed, full_blocks) is None


@given(st.binary(max_size=64), st.none() | st.integers(0, 8))
def test_any_bytes_give_a_sound_list_or_none(packed, full_blocks):
    hashes = unpack_hashes(packed, full_blocks)
    if hashes is not None:
        assert pack_hashes(hashes) == packed
        assert all(1 <= value <= LARGEST for value in hashes)
        assert len(set(hashes)) == len(hashes)
        assert full_blocks in (None, len(hashes))


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
