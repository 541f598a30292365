"""Prompts as they travel."""

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.inference.coordinator.runtime import prompts, wire

EDGES = [0, 1, 127, 128, 255, 256, 65535, 65536, 2**31, 2**32 - 1, 2**32, -1, 2**63 - 1]
TOKENS = st.lists(st.sampled_from(EDGES) | st.integers(0, 200_000), max_size=40)


@given(TOKENS)
def test_every_peer_reads_the_ids_and_so_do_we(tokens):
    packed = prompts.pack(prompts.as_array(tokens))
    assert msgpack.unpackb(packed) == tokens
    assert list(prompts.unpack(packed)) == tokens
    assert prompts.size(packed) == (len(tokens) or 1)


@given(TOKENS)
def test_what_other_peers_pack_is_read_as_well(tokens):
    packed = msgpack.packb(tokens)
    assert list(prompts.unpack(packed)) == tokens
    assert prompts.size(packed) == (len(tokens) or 1)


@pytest.mark.parametrize("count", [1, 15, 16, 65535, 65536])
@pytest.mark.parametrize(("token", "width"), [(9, 1), (40_000, 3), (150_000, 5)])
def test_ids_of_one_width_become_an_array_without_a_list(count, token, width, monkeypatch):
    monkeypatch.setattr(wire, "unpack", None)
    monkeypatch.setattr(wire, "pack", None)
    packed = prompts.pack(np.full(count, token))
    assert len(packed) - count * width in (1, 3, 5)
    tokens = prompts.unpack(packed)
    assert (tokens.dtype, tokens.shape, set(tokens.tolist())) == (np.int64, (count,), {token})
    assert tokens.flags.writeable  # torch takes no other


@pytest.mark.parametrize("value", ["text", "", {"a": 1}, None, 7, [1, "2"], [1.5], [[1]], [True]])
def test_anything_else_is_what_msgpack_finds(value):
    packed = wire.pack(value)
    assert prompts.unpack(packed) == value
    assert prompts.size(packed) >= 1


@given(st.binary(max_size=30))
def test_no_bytes_do_any_harm(packed):
    assert prompts.size(packed) >= 0
    try:
        found = prompts.unpack(packed)
    except wire.WireError:
        return
    if isinstance(found, np.ndarray):
        assert found.tolist() == wire.unpack(packed)


@pytest.mark.parametrize("packed", [b"\xdd\xff\xff\xff\xff\x01", b"\xdc", b"\xdc\x00", b"\x92\x01"])
def test_an_array_that_lies_about_its_length_is_refused(packed):
    with pytest.raises(wire.WireError):
        prompts.unpack(packed)


@pytest.mark.parametrize("tokens", [[1.5], ["1"], [None], [[1]], "text", np.ones(2), np.eye(2)])
def test_what_is_no_list_of_ids_is_an_error_of_the_caller(tokens):
    with pytest.raises(TypeError):
        prompts.as_array(tokens)


def test_sequences_of_any_kind_are_taken():
    assert prompts.as_array((1, 2)).tolist() == prompts.as_array(b"\x01\x02").tolist() == [1, 2]
    assert prompts.as_array(np.arange(3, dtype=np.int32)).dtype == np.int64
    assert prompts.as_array(np.array([])).tolist() == []
