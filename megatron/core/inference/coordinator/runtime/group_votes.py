"""Barriers and votes of a process group on the CPU, beside a busy GPU.

`GroupVotes` takes the place of the released `AsyncZMQCommunicator`, which anybody who reaches its
port can fake a vote to or end with three bytes, and which loses the first result where a rank is
slow to subscribe.
"""

import asyncio
import logging
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.inference.coordinator.runtime.eventlog import render
from megatron.core.inference.coordinator.runtime.group_channel import GroupLeader, GroupMember

logger = logging.getLogger(__name__)

_AGAIN_SECONDS = 0.001
_BYTES = 4

Values = tuple[int, ...]


class GroupVotes:
    """The greatest of what the ranks of a group say, told to all of them.

    Args:
        channel: This rank's end of the group's channel, all of whose members have joined.
        size: Ranks in the group, 2 or more.
    """

    def __init__(self, channel: GroupLeader | GroupMember, size: int):
        self._channel = channel
        self._size = size

    async def all_reduce_max(self, *values: int, async_op: bool = True) -> Any:
        """The greatest value of each place over all ranks, which must all call it.

        Args:
            values: 32-bit integers, as many on each rank.
            async_op: Let the event loop run meanwhile.

        Returns:
            An int for one value, else a tuple.
        """
        if not async_op:
            result = self.sync_all_reduce_max(*values)
            await asyncio.sleep(0)  # others on this loop get a turn
            return result
        result = self._vote(values)
        while (greatest := result(0.0)) is None:
            await asyncio.sleep(_AGAIN_SECONDS)
        return _alone_or_all(greatest)

    def sync_all_reduce_max(self, *values: int) -> Any:
        """`all_reduce_max` without an event loop: it blocks."""
        result = self._vote(values)
        while (greatest := result(1.0)) is None:
            pass
        return _alone_or_all(greatest)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def _vote(self, values: Values) -> Callable[[float], Values | None]:
        """Vote; returns what waits so many seconds for the result, and gives None without one."""
        channel = self._channel
        if isinstance(channel, GroupLeader):
            return partial(self._count, channel, {0: values})
        channel.tell([_packed(values)])
        return partial(_told, channel)

    def _count(
        self, channel: GroupLeader, votes: dict[int, Values], seconds: float
    ) -> Values | None:
        """Take votes, by rank; once all are there, tell and return the result."""
        while len(votes) < self._size:
            heard = channel.hear(seconds)
            if heard is None:
                return None
            rank, frames = heard
            if [len(frame) for frame in frames] == [_BYTES * len(votes[0])]:
                votes[rank] = _unpacked(frames[0])
            else:
                logger.warning("%s", render("vote_refused", {"rank": rank, "frames": len(frames)}))
        greatest = tuple(map(max, zip(*votes.values(), strict=True)))
        channel.tell([_packed(greatest)])
        return greatest


def _told(channel: GroupMember, seconds: float) -> Values | None:
    frames = channel.hear(seconds)
    return None if frames is None else _unpacked(frames[0])


def _alone_or_all(values: Values) -> int | Values:
    return values if len(values) > 1 else values[0]


def _packed(values: Values) -> bytes:
    return struct.pack(f"!{len(values)}i", *values)


def _unpacked(frame: bytes) -> Values:
    return struct.unpack(f"!{len(frame) // _BYTES}i", frame)
