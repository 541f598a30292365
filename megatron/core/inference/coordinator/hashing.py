"""Block hashes of a prompt: what clients compute and the coordinator routes on.

A block is `block_size` consecutive prompt tokens; only full blocks are hashed. Hashes are chained
(digest_i = SHA256(digest_{i-1} || tokens_i as little-endian int64), digest_{-1} = 32 zero bytes;
value = little-endian uint64 of digest[:8] mod (2^63 - 1), plus 1), so an equal hash means an equal
whole prefix. The values equal those of megatron-core's `compute_block_hashes_batched`, which the
engine keys its cache with.
"""

import hashlib
import struct
from collections.abc import Sequence

import numpy as np

HASH_BYTES = 8
"""Bytes of one packed hash: a little-endian int64."""

LARGEST_HASH = 2**63 - 1
_FEW = 64
"""Hashes up to which Python's own set finds duplicates faster than a numpy sort."""

_UNPACK_FEW = [struct.Struct(f"<{count}q").unpack for count in range(_FEW + 1)]


def block_hashes(tokens: Sequence[int] | np.ndarray, block_size: int) -> list[int]:
    """Hash every full block of a prompt.

    Args:
        tokens: Token ids, shape [n].
        block_size: Tokens in a block, 1 or more.

    Returns:
        n // block_size hashes in [1, 2^63 - 1], the first block's first.
    """
    hashes: list[int] = np.frombuffer(packed_block_hashes(tokens, block_size), "<i8").tolist()
    return hashes


def packed_block_hashes(
    tokens: Sequence[int] | np.ndarray, block_size: int, salt: int = 0
) -> bytes:
    """`pack_hashes(masked(block_hashes(tokens, block_size), salt))`, without the lists between."""
    full = len(tokens) // block_size * block_size
    if full == 0:
        return b""
    if isinstance(tokens, list):  # numpy would look at every item before it converts one
        array = np.fromiter(tokens, "<i8", full)
    else:
        array = np.asarray(tokens, "<i8")[:full]
    sha256, digest = hashlib.sha256, bytes(32)
    digests = []
    for (block,) in struct.iter_unpack(f"{block_size * 8}s", array.tobytes()):
        digest = sha256(digest + block).digest()
        digests.append(digest)
    words = np.frombuffer(b"".join(digests), "<u8")[::4]
    hashes = words % np.uint64(LARGEST_HASH) + np.uint64(1)
    if salt:
        hashes = np.where(hashes == np.uint64(salt), hashes, hashes ^ np.uint64(salt))
    return hashes.tobytes()


def epoch_mask(epoch: int) -> int:
    """What the keys of a weight epoch are masked with; 0 at epoch 0.

    The little-endian uint64 of SHA256(epoch as little-endian int64)[:8], its top bit cleared.
    """
    if epoch == 0:
        return 0
    return mask_of(epoch.to_bytes(8, "little", signed=True))


def mask_of(name: bytes) -> int:
    """A mask, or salt, in [0, 2^63 - 1]: the first 8 bytes of SHA256(name), the top bit cleared."""
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "little") & LARGEST_HASH


def rekeyed(hashes: Sequence[int], epoch: int) -> list[int]:
    """Block hashes as keys of a weight epoch, or such keys as block hashes: its own inverse.

    Two epochs share no key of the same block, so KV of one can never be found under the other.

    Args:
        hashes: Block hashes, or keys of this epoch.
        epoch: The weight epoch.
    """
    return masked(hashes, epoch_mask(epoch))


def masked(hashes: Sequence[int], mask: int) -> list[int]:
    """Block hashes under a mask, or a salt: its own inverse.

    On [1, 2^63 - 1] this is a bijection: the hash that equals the mask stays itself, where the xor
    would give 0. The engine's 0 (no parent) and -1 (no hash) are never masked.

    Args:
        hashes: Block hashes, masked or not.
        mask: In [0, 2^63 - 1]; 0 changes nothing.
    """
    return [h if h <= 0 or h == mask else h ^ mask for h in hashes]


def pack_hashes(hashes: Sequence[int]) -> bytes:
    """Pack hashes for the wire: little-endian int64, 8 bytes each."""
    return np.asarray(hashes, dtype="<i8").tobytes()


def checked_hashes(packed: bytes, full_blocks: int | None) -> bytes | None:
    """Check a hash frame, which is untrusted input.

    Args:
        packed: Little-endian int64 hashes, in anything that `bytes` takes.
        full_blocks: How many the prompt has, or None when its length is unknown.

    Returns:
        The same as bytes, or None when the list cannot be right: a wrong length, a value outside
        [1, 2^63 - 1], or duplicates (chained hashes never repeat within one prompt).
    """
    if not isinstance(packed, bytes):
        packed = bytes(packed)
    count, rest = divmod(len(packed), HASH_BYTES)
    if rest or (full_blocks is not None and count != full_blocks):
        return None
    if count <= _FEW:
        distinct = set(_UNPACK_FEW[count](packed))
        # The last byte of a hash has the sign in its top bit.
        sound = len(distinct) == count and 0 not in distinct and packed[7::8].isascii()
    else:
        values = np.frombuffer(packed, "<i8").copy()
        values.sort()  # np.sort takes half a microsecond more
        sound = bool(values[0] > 0 and (values[1:] != values[:-1]).all())
    return packed if sound else None


def expected_skip(prompt_tokens: int, cached_blocks: int, block_size: int) -> int:
    """How many tokens of prefill the engine skips when it holds a prompt's first blocks.

    The engine always computes at least 2 tokens of a prompt that has 2, rounded down to a block
    (a 1-token prefill would look like a decode step to its attention kernels).

    Args:
        prompt_tokens: Length of the prompt.
        cached_blocks: Blocks held, counted from the first.
        block_size: Tokens in a block.

    Returns:
        Tokens skipped.
    """
    skip = min(cached_blocks * block_size, max(0, prompt_tokens - 1))
    if prompt_tokens >= 2 and prompt_tokens - skip < 2:
        skip = (prompt_tokens - 2) // block_size * block_size
    return skip
