"""Collecting something from every rank: in processes of a real group, in a thread of each."""

import asyncio
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from megatron.core.inference.coordinator.runtime import gathering
from megatron.core.inference.coordinator.runtime.fork_server import warm_up

SECONDS = 60


def _rank(rank: int, file: str, pipe: Connection) -> None:
    """Gathers twice in another thread, where a collective would be an error."""
    store = torch.distributed.FileStore(file, 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)

    async def run() -> list[Any]:
        ticks = 0

        async def tick() -> None:  # as an engine's loop does
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticking = asyncio.create_task(tick())
        if rank == 1:
            pipe.recv()  # it is late
        first = await asyncio.to_thread(gathering.gathered, [f"http://rank{rank}", rank == 1])
        second = await asyncio.to_thread(gathering.gathered, rank)
        ticking.cancel()
        return [first, second, ticks > 10]

    pipe.send(asyncio.run(run()))
    pipe.recv()
    torch.distributed.destroy_process_group()


def test_every_rank_gets_all_values_while_its_loop_goes_on(tmp_path):
    context = warm_up()
    pipes, processes = [], []
    for rank in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(rank, str(tmp_path / "store"), theirs))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    assert not pipes[0].poll(1)
    pipes[1].send("go")
    found = []
    for pipe in pipes:
        assert pipe.poll(SECONDS)
        found.append(pipe.recv())
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send("end")
        process.join(SECONDS)
    values = [["http://rank0", False], ["http://rank1", True]], [0, 1]
    assert [each[:2] for each in found] == [list(values)] * 2
    assert found[0][2]  # while it waited for the other one


def test_a_rank_on_its_own_needs_no_store(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    assert gathering.gathered("me") == ["me"]


def test_a_rank_that_does_not_report_is_named(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(gathering, "_get_default_store", torch.distributed.HashStore)
    monkeypatch.setattr(gathering, "_PATIENCE_SECONDS", 0.1)
    with pytest.raises(TimeoutError, match="rank 1 did not report"):
        gathering.gathered("me")
