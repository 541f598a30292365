"""Replicas from separate jobs, on real engines: they are lost, leave, join, stand still, come back.

The coordinator, the jobs and one engine to compare with start once, at the same time. The tests
follow each other: each leaves to the next what is left of the fleet.
"""

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import one_engine
import psutil
import pytest
from jobs import Coordinator, Gate, Job, ask, client_of, coordinator, job, wait_for
from listening import beyond_loopback, listened_at
from one_engine import ANSWER_TOKENS, PROMPTS
from openai import OpenAI

from megatron.core.inference.coordinator.runtime.client import InferenceClient

HUNG_SECONDS = 8
HUNG = f"--inference-coordinator-hung-timeout={HUNG_SECONDS}"
NO_FRONT_END = "--frontend-replicas=0"
ANSWER_SECONDS = 60


@dataclass
class Fleet:
    """What has been started.

    Attributes:
        coordinator: The coordinator.
        jobs: Jobs by name: a, b and c serve from the beginning, d and e join through their gates.
        urls: Front ends of job b.
        gates: What d and e need to reach the coordinator.
        answers: One engine's answers, by prompt.
    """

    coordinator: Coordinator
    jobs: dict[str, Job]
    urls: list[str]
    gates: dict[str, Gate]
    answers: list[list[int]]

    def count(self, event: str) -> int:
        return len(self.coordinator.said(event))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("separate_jobs")
    with ExitStack() as stack:
        lead = stack.enter_context(coordinator(folder / "coordinator", HUNG))
        gates = {name: Gate(lead.port) for name in "de"}
        jobs = {}
        for name in "abcde":
            address = gates[name].address if name in gates else None
            front_ends = "--frontend-replicas=1" if name == "b" else NO_FRONT_END
            jobs[name] = stack.enter_context(job(folder / name, lead, front_ends, address=address))
        reference = subprocess.Popen(
            [sys.executable, one_engine.__file__, folder / "answers.json"],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        stack.callback(reference.wait, timeout=120)
        urls = [jobs[name].await_ready() for name in "abc"]
        assert reference.wait(timeout=120) == 0
        answers = json.loads((folder / "answers.json").read_text())
        yield Fleet(lead, jobs, urls[1], gates, answers)


async def answers(futures: list[asyncio.Future]) -> list[list[int]]:
    """All answers, each of which must have been computed."""
    replies = await asyncio.wait_for(asyncio.gather(*futures), ANSWER_SECONDS)
    assert [reply["status"] for reply in replies] == ["COMPLETED"] * len(replies)
    return [reply["generated_tokens"] for reply in replies]


async def until(condition: Callable[[], bool], seconds: float = 30) -> float:
    """Wait until something is true; returns the seconds that it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "it did not happen in time"
        await asyncio.sleep(0.02)
    return time.monotonic() - began


_AT_ONCE = 4


def under_load(
    fleet: Fleet, act: Callable[[], None], begun: Callable[[], bool] = lambda: True
) -> None:
    """Submit every prompt, let something happen while they run, and submit more until it has begun.

    The answers must be those of one engine.
    """

    async def run() -> list[list[int]]:
        async with client_of(fleet.coordinator) as client:

            def submit() -> list[asyncio.Future]:
                return [ask(client, prompt, ANSWER_TOKENS) for prompt in PROMPTS]

            asked = submit()
            await asyncio.sleep(0.15)
            assert not all(future.done() for future in asked)
            await asyncio.to_thread(act)
            asked += submit()
            deadline = time.monotonic() + ANSWER_SECONDS
            while not begun():
                assert time.monotonic() < deadline, "it did not begin"
                while sum(not future.done() for future in asked) < _AT_ONCE * len(PROMPTS):
                    asked += submit()  # so many that all replicas have some, however fast they are
                await asyncio.sleep(0.02)
            return await answers(asked)

    found = asyncio.run(run())
    assert found == fleet.answers * (len(found) // len(PROMPTS))


def test_on_one_host_nothing_listens_beyond_loopback(fleet):
    for each in (fleet.coordinator, fleet.jobs["a"], fleet.jobs["b"]):
        assert beyond_loopback(listened_at(each.look())) == []


def test_of_a_job_that_is_killed_under_load_nothing_is_lost(fleet):
    under_load(fleet, fleet.jobs["a"].kill)
    (lost,) = fleet.coordinator.said("rank_lost")
    assert lost["cause"] == "its connection broke"
    assert int(lost["requests"]) > 0


def test_a_job_that_is_told_to_end_answers_what_it_has_and_nothing_is_tried_again(fleet):
    """Its engine and its front end."""
    leaving, lost = fleet.jobs["b"], fleet.count("rank_lost")
    with OpenAI(base_url=f"{fleet.urls[0]}/v1", api_key="none", max_retries=0) as openai:
        completions = SimpleNamespace(left=None)

        def complete() -> None:
            completions.left = openai.completions.create(
                model="megatron", prompt=PROMPTS[0], max_tokens=ANSWER_TOKENS, temperature=0
            )

        over_http = threading.Thread(target=complete)

        def leave() -> None:
            over_http.start()
            time.sleep(0.5)
            leaving.process.send_signal(signal.SIGTERM)

        under_load(fleet, leave, lambda: fleet.count("rank_draining") > 0)
        over_http.join(ANSWER_SECONDS)
    assert completions.left.choices[0].generation_token_ids == fleet.answers[0]
    assert leaving.process.wait(timeout=30) == 0
    (draining,) = fleet.coordinator.said("rank_draining")
    assert int(draining["requests"]) > 0
    (left,) = fleet.coordinator.said("rank_left")
    assert (left["rank"], left["requests"]) == (draining["rank"], "0")
    assert fleet.count("rank_lost") == lost
    assert "Traceback" not in leaving.log
    _, alive = psutil.wait_procs(leaving.family, timeout=5)
    assert alive == []


def ranks_of(fleet: Fleet, prompt_tokens: int) -> set[int]:
    """The ranks that answered requests of this length; the coordinator has ended."""
    schedule = json.loads((fleet.coordinator.folder / "schedule.json").read_text())
    return {r["rank_index"] for r in schedule["records"] if r["prompt_tokens"] == prompt_tokens}


_LONG_ANSWER = 200
"""Tokens that take an engine longer than a moment, also on a fast machine."""

JOINED, JOINED_PAUSED, RETURNED, UNHUNG = 67, 71, 73, 79
"""Lengths of prompts by which the coordinator's schedule tells who answered them."""


def new_requests(client: InferenceClient, length: int, tokens: int = 4) -> list[asyncio.Future]:
    """Submit requests that have nothing in common with others: all ranks get some of them."""
    return [ask(client, [40 + n] * length, tokens) for n in range(8)]


def test_a_job_that_joins_serves_soon(fleet):
    async def run() -> None:
        async with client_of(fleet.coordinator) as client:
            registered = fleet.count("ranks_registered")
            running = [ask(client, prompt, ANSWER_TOKENS) for prompt in PROMPTS]
            fleet.gates["d"].open()
            await until(lambda: fleet.count("ranks_registered") == registered + 1)
            began = time.monotonic()
            new = new_requests(client, JOINED)  # it has the smallest load: they go there first
            await asyncio.wait(new, return_when=asyncio.FIRST_COMPLETED)
            assert time.monotonic() - began < 25
            await answers(new)
            assert await answers(running) == fleet.answers

    wait_for(lambda: "joining the coordinator" in fleet.jobs["d"].log, 120)
    asyncio.run(run())


def test_a_job_that_joins_a_paused_fleet_is_paused_and_serves_when_it_goes_on(fleet):
    async def run() -> None:
        async with client_of(fleet.coordinator) as client:
            registered = fleet.count("ranks_registered")
            client.pause_engines()
            try:
                fleet.gates["e"].open()
                await until(lambda: fleet.count("ranks_registered") == registered + 1)
                # An engine that had something to do may go on for 20 steps before it stands still.
                waiting = new_requests(client, JOINED_PAUSED, tokens=50)
                await asyncio.sleep(1.5)
                assert not any(future.done() for future in waiting)
            finally:
                client.unpause_engines()
            await answers(waiting)

    wait_for(lambda: "joining the coordinator" in fleet.jobs["e"].log, 120)
    asyncio.run(run())


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    """All threads of a process stand still, those that send its heartbeats too."""
    process.suspend()
    try:
        yield
    finally:
        process.resume()


@contextmanager
def hung(process: psutil.Process) -> Iterator[None]:
    """The main thread of a process stands still: its connections do not break."""
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    seize, interrupt, detach = 0x4206, 0x4207, 17
    if ptrace(seize, process.pid, None, None) != 0:
        pytest.skip(f"no permission to trace a process ({os.strerror(ctypes.get_errno())})")
    assert ptrace(interrupt, process.pid, None, None) == 0
    os.waitpid(process.pid, 0x40000000)  # __WALL: it is no child
    try:
        yield
    finally:
        assert ptrace(detach, process.pid, None, None) == 0


@pytest.mark.parametrize(
    ("stand_still", "cause", "length"),
    [
        (stopped, "its connection broke", RETURNED),
        (hung, f"no sign of life for {HUNG_SECONDS} s", UNHUNG),
    ],
)
def test_a_job_that_stands_still_is_served_by_others_and_comes_back(
    fleet, stand_still, cause, length
):
    def lost_since(before: int) -> list[dict[str, str]]:
        return fleet.coordinator.said("rank_lost")[before:]

    async def run() -> None:
        async with client_of(fleet.coordinator) as client:
            lost = fleet.count("rank_lost")
            running = [ask(client, prompt, ANSWER_TOKENS) for prompt in PROMPTS]
            everywhere = new_requests(client, length + 1, _LONG_ANSWER)
            await asyncio.sleep(0.15)
            with stand_still(fleet.jobs["c"].worker):
                assert await answers(running) == fleet.answers
                await answers(everywhere)
                ours = [each["rank"] for each in lost_since(lost) if each["cause"] == cause]
                registered = fleet.count("ranks_registered")
            await until(lambda: fleet.count("ranks_registered") == registered + 1)
            await answers(new_requests(client, length))
            # On a busy machine another one may be away for a while.
            assert sum(each["rank"] == ours[0] for each in lost_since(lost)) == 1

    asyncio.run(run())
    assert "requests_dropped" in fleet.jobs["c"].log


def test_at_the_end_the_coordinator_has_counted_what_happened(fleet):
    lost = fleet.coordinator.said("rank_lost")
    counts = fleet.coordinator.stop()
    assert counts["rank_left"] == counts["rank_draining"] == 1
    assert counts.get("message_refused", 0) == 0
    assert "Traceback" not in fleet.coordinator.log
    schedule = json.loads((fleet.coordinator.folder / "schedule.json").read_text())
    numbers = [record["request_id"] for record in schedule["records"]]
    assert len(set(numbers)) == len(numbers)  # nothing was answered twice
    # Who registers first gets the lower number: a, b and c in any order, then d, then e.
    assert 3 in ranks_of(fleet, JOINED)
    assert 4 in ranks_of(fleet, JOINED_PAUSED)
    back = {int(entry["rank"]) for entry in lost[1:]}  # the first one was killed
    assert back & ranks_of(fleet, RETURNED)
    assert back & ranks_of(fleet, UNHUNG)
