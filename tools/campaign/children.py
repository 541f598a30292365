"""Processes of the campaign: forked from one that has imported everything, ended with it."""

import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

_LIGHT = ["campaign.light", "campaign.stand_in", "campaign.clients"]
_PRELOAD = {
    "stub": _LIGHT,
    "real": ["campaign.real_engine", "campaign.clients"],
    "released": [
        "megatron.core.inference.data_parallel_inference_coordinator",
        "coordinator_bench.plane_processes",
        "coordinator_bench.released",
        *_LIGHT,
    ],
}
_PR_SET_PDEATHSIG = 1


class Children:
    """Starts processes.

    Args:
        kind: What they need to have imported: "real", "stub" or "released".
        folder: For their logs.
        hang_seconds: How long SIGUSR1 lets the main thread of one stand still.
    """

    def __init__(self, kind: str, folder: Path, hang_seconds: float):
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch starts up
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["PYTHONWARNINGS"], os.environ["TORCH_LOGS"] = "ignore", "-all"
        # The fork server of Python 3.13 leaves sys.path alone while it imports.
        tools = str(Path(__file__).resolve().parents[1])
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [tools, os.environ.get("PYTHONPATH")])
        )
        self.context: ForkServerContext = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(_PRELOAD[kind])
        self._folder, self._hang_seconds = folder, hang_seconds

    def start(self, name: str, work: str, *arguments: Any) -> ForkServerProcess:
        """Start one.

        Args:
            name: Of its log.
            work: The function that it runs, `module:name`; imported there, not here.
            arguments: Of the function.
        """
        log = str(self._folder / f"{name}.log")
        process = self.context.Process(
            target=_run, args=(log, self._hang_seconds, work, arguments), name=name, daemon=True
        )
        process.start()
        return process


def _run(log: str, hang_seconds: float, work: str, arguments: tuple[Any, ...]) -> None:
    # The fork server ends when the campaign does, however it does.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the campaign ends us
    signal.signal(signal.SIGUSR1, lambda *_: time.sleep(hang_seconds))
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
    module, _, name = work.partition(":")
    getattr(importlib.import_module(module), name)(*arguments)
