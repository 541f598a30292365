"""Barriers and votes of a group."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from megatron.core.inference.engines.async_zmq_communicator import AsyncZMQCommunicator

from megatron.core.inference.coordinator.runtime.group_channel import GroupLeader, GroupMember
from megatron.core.inference.coordinator.runtime.group_votes import GroupVotes

SIZE = 3


def in_all_ranks(act) -> list:
    """What each rank's `act(votes, rank)` returns, the leader's first; each is in a thread."""
    leader = GroupLeader(SIZE - 1)

    def live(rank: int):
        channel = leader if rank == 0 else GroupMember(leader.invitation, rank)
        if rank == 0:
            leader.wait_for_members()
        votes = GroupVotes(channel, SIZE)
        try:
            return act(votes, rank)
        finally:
            votes.close()

    with ThreadPoolExecutor(SIZE) as pool:
        ranks = [pool.submit(live, rank) for rank in range(SIZE)]
        return [rank.result(20) for rank in ranks]


@pytest.mark.parametrize("how", ["sync", "async", "async, blocking"])
def test_every_rank_gets_the_greatest_of_each_place_round_after_round(how):
    def vote(votes: GroupVotes, rank: int) -> list:
        def once(*values: int):
            if how == "sync":
                return votes.sync_all_reduce_max(*values)
            return asyncio.run(votes.all_reduce_max(*values, async_op=how == "async"))

        return [once(rank), once(-rank, 5), *(once(n + rank % 2, rank) for n in range(50))]

    expected = [2, (0, 5), *((n + 1, 2) for n in range(50))]
    assert in_all_ranks(vote) == [expected] * SIZE


def test_an_event_loop_goes_on_while_a_rank_waits_for_the_others():
    def vote(votes: GroupVotes, rank: int) -> bool:
        async def live() -> bool:
            if rank == SIZE - 1:
                await asyncio.sleep(0.2)
                await votes.all_reduce_max(1)
                return True
            turns = 0
            waiting = asyncio.create_task(votes.all_reduce_max(1))
            while not waiting.done():
                turns += 1
                await asyncio.sleep(0.005)
            return turns > 5

        return asyncio.run(live())

    assert all(in_all_ranks(vote))


def test_frames_that_are_no_vote_are_refused_and_the_vote_goes_on():
    def vote(votes: GroupVotes, rank: int) -> int:
        if rank:
            for frames in ([b"bad"], [], [b""], [b"1234", b"1234"], [b"12345678"]):
                votes._channel.tell([*frames] or [b""])
        return votes.sync_all_reduce_max(rank)

    assert in_all_ranks(vote) == [SIZE - 1] * SIZE


def test_it_has_the_methods_of_the_released_communicator():
    released = {name for name in vars(AsyncZMQCommunicator) if not name.startswith("_")}
    assert released <= set(dir(GroupVotes))
