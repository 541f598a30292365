"""The loop: play, pause, suspend, update, new epoch, resume; at the end, compare and tell."""

import argparse
import asyncio
import contextlib
import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import options
import torch
from agents import Rollout
from driver import Driver
from replica import Replica
from trainer import Trainer

from megatron.core.inference.coordinator import patch
from megatron.core.inference.coordinator.runtime import fork_server
from megatron.core.inference.coordinator.runtime.gathering import gathered


def main(argv: Sequence[str]) -> None:
    """Run the loop on this rank; the first one prints a line of JSON at the end."""
    logging.disable(logging.INFO)
    logging.getLogger("megatron").setLevel(logging.ERROR)
    logging.getLogger("megatron.core.inference.coordinator").setLevel(logging.WARNING)
    with contextlib.redirect_stdout(sys.stderr):  # standard output is for that line
        args = options.parse(argv)
        if not args.released:
            patch()
            fork_server.warm_up()  # its imports go on while the model is built
        else:
            logging.disable(logging.WARNING)  # its server warns of each reply, and shows all of it
        replica = Replica(args)
        with tempfile.TemporaryDirectory() as folder:
            result = asyncio.run(run(args, replica, Path(folder) / "schedule.json"))
    if result is not None:
        print(json.dumps(result), flush=True)
    torch.distributed.destroy_process_group()


async def run(args: argparse.Namespace, replica: Replica, schedule: Path) -> dict[str, Any] | None:
    """All iterations and the comparison; returns the totals on the first rank."""
    await replica.start(schedule)
    trainer = Trainer(replica.model, args.step_size, args.window)
    driver = Driver(args, replica.urls) if replica.rank == 0 else None
    for number in range(1, args.iterations + 1):
        rollouts = await driver.play(number) if driver else []
        await replica.paused()
        loss = await replica.update(number, lambda mine=rollouts: trainer.step(_from_first(mine)))
        served = await asyncio.to_thread(gathered, replica.served())
        if driver:
            driver.updated(loss, served)
    answers = await driver.ask_again() if driver else {}
    await replica.stop()
    if driver is None:
        return None
    fresh = replica.answers_of_a_fresh_engine(list(answers), driver.answer_tokens)
    return driver.result(answers, fresh, schedule)


def _from_first(rollouts: list[Rollout]) -> list[Rollout]:
    """The rollouts of the first rank, on every rank."""
    box = [rollouts]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]
