"""Two hosts, in network namespaces: the network between them is cut, or slow and loses packets.

The coordinator is on the first one, and a job is on each. `LONG_CUTS=1` adds a cut of a minute.
What is measured is printed (`pytest -rP`).
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec

import hosts
import pytest
from hosts import Host, Wire
from jobs import (
    START_SECONDS,
    TOOLS,
    Coordinator,
    Job,
    ask,
    client_of,
    coordinator,
    job,
    started,
    wait_for,
)
from one_engine import PROMPTS
from openai import OpenAI

from megatron.core.inference.coordinator.runtime.client import Disconnected, InferenceClient

NO_NETWORK = hosts.missing()
pytestmark = pytest.mark.skipif(NO_NETWORK is not None, reason=str(NO_NETWORK))

TOKENS = 12
IN_FLIGHT = 6
WAIT_SECONDS = 60
long_cut = pytest.mark.skipif("LONG_CUTS" not in os.environ, reason="LONG_CUTS is not set")


@dataclass
class Fleet:
    """The hosts, what is between them, and what runs on them."""

    first: Host
    second: Host
    wire: Wire
    coordinator: Coordinator
    near: Job
    far: Job


@pytest.fixture(scope="module")
def network() -> Iterator[tuple[Host, Host, Wire]]:
    with hosts.two_hosts() as made:
        yield made


@pytest.fixture(scope="module")
def fleet(network, tmp_path_factory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("two_hosts")
    first, second, wire = network
    with ExitStack() as stack:
        lead = stack.enter_context(
            coordinator(folder / "coordinator", f"--host={first.address}", host=first.run)
        )
        near, far = (
            stack.enter_context(job(folder / name, lead, "--frontend-replicas=0", host=host.run))
            for name, host in (("near", first), ("far", second))
        )
        near.await_ready()
        far.await_ready()
        yield Fleet(first, second, wire, lead, near, far)


@pytest.mark.parametrize("named", [False, True])
def test_one_job_on_two_hosts_needs_no_more_than_ray_tells_its_workers(network, tmp_path, named):
    """Of a rank's place: RANK, LOCAL_RANK, WORLD_SIZE and MASTER_ADDR."""
    first, second, _ = network
    place = ["WORLD_SIZE=2", "LOCAL_RANK=0", f"MASTER_ADDR={first.address}", "MASTER_PORT=29533"]
    flags = ["--frontend-on-all-ranks", "--frontend-replicas=1", "--url-file=urls.json"]
    if named:  # the same on both
        flags.append(f"--inference-coordinator-host={first.address}")
    tool = [sys.executable, TOOLS / "run_dynamic_text_generation_server.py", "--device=cpu"]
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                started(
                    Job,
                    tmp_path / str(rank),
                    [*tool, "--host=0.0.0.0", *flags],
                    [*host.run, *place, f"RANK={rank}"],
                )
            )
            for rank, host in enumerate((first, second))
        ]
        urls = ranks[0].await_ready()
        assert [url.rsplit(":", 1)[0] for url in urls] == [
            f"http://{host.address}" for host in (first, second)
        ]
        with first.entered():
            for url in urls:
                with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as openai:
                    answer = openai.completions.create(
                        model="megatron", prompt=PROMPTS[0], max_tokens=4, temperature=0
                    )
                assert answer.usage.completion_tokens == 4


@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed (group ray)")
def test_ray_s_actors_on_two_hosts_serve_as_one_job(network, tmp_path):
    first, second, _ = network
    node = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"]
    node += ["--disable-usage-stats", "--object-store-memory=100000000"]
    at = f"{first.address}:6379"
    roles = {
        "head": (first, "--head", "--port=6379", "--include-dashboard=false"),
        "other": (second, f"--address={at}"),
    }
    flags = ["--ranks=2", "--gpus-per-rank=0", "--device=cpu", "--host=0.0.0.0"]
    flags += ["--frontend-on-all-ranks", "--frontend-replicas=1"]
    flags.append(f"--url-file={tmp_path / 'serve' / 'urls.json'}")
    with ExitStack() as stack:
        for name, (host, *options) in roles.items():
            command = [*node, f"--node-ip-address={host.address}", *options]
            ray = stack.enter_context(started(Job, tmp_path / name, command, host.run))
            wait_for(lambda ray=ray: "Ray runtime started" in ray.log, START_SECONDS)
        served = stack.enter_context(
            started(
                Job,
                tmp_path / "serve",
                [sys.executable, TOOLS.parent / "examples" / "serve_ray.py", *flags],
                [*first.run, f"RAY_ADDRESS={at}"],
            )
        )
        hosts_of_urls = [url.rsplit(":", 1)[0] for url in served.await_ready()]
    assert sorted(hosts_of_urls) == [f"http://{host.address}" for host in (first, second)]


class Traffic:
    """Requests of a client on the coordinator's host, a few at a time, until it is told to end.

    Attributes:
        answers: Every answer, by number of the prompt.
        running: Whether it goes on.
    """

    def __init__(self, client: InferenceClient):
        self._client = client
        self.answers: list[tuple[int, list[int]]] = []
        self.running = True

    async def flow(self) -> None:
        await asyncio.gather(*(self._ask_again_and_again(n) for n in range(IN_FLIGHT)))

    async def _ask_again_and_again(self, number: int) -> None:
        while self.running:
            future = ask(self._client, PROMPTS[number], TOKENS)
            reply = await asyncio.wait_for(future, WAIT_SECONDS)
            assert reply["status"] == "COMPLETED"
            self.answers.append((number, reply["generated_tokens"]))


def with_traffic(fleet: Fleet, act: Callable[[], None]) -> None:
    """Let something happen while requests flow: each is answered, and as before."""

    async def run() -> None:
        with fleet.first.entered():  # where the client's sockets stay
            async with client_of(fleet.coordinator) as client:
                traffic = Traffic(client)
                flow = asyncio.create_task(traffic.flow())
                try:
                    await asyncio.sleep(1)
                    await asyncio.to_thread(act)
                finally:
                    traffic.running = False
                    await flow
        answers = dict(traffic.answers)
        assert len(answers) == IN_FLIGHT
        assert [answers[number] for number, _ in traffic.answers] == [
            answer for _, answer in traffic.answers
        ]
        print(f"{len(traffic.answers)} requests answered, 0 lost")

    asyncio.run(run())


def seconds_until(condition: Callable[[], bool], limit: float) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit, "it did not happen in time"
        time.sleep(0.02)
    return time.monotonic() - began


@pytest.mark.parametrize("seconds", [5, pytest.param(60, marks=long_cut)])
def test_a_cut_costs_no_request_and_the_replica_behind_it_comes_back_by_itself(fleet, seconds):
    lead = fleet.coordinator
    lost, registered = len(lead.said("rank_lost")), len(lead.said("ranks_registered"))

    def cut() -> None:
        with fleet.wire.cut():
            began = time.monotonic()
            noticed = seconds_until(lambda: len(lead.said("rank_lost")) > lost, 20)
            time.sleep(max(0.0, began + seconds - time.monotonic()))
        back = seconds_until(lambda: len(lead.said("ranks_registered")) > registered, 30)
        print(f"cut for {seconds} s: noticed after {noticed:.1f} s, back {back:.1f} s after it")

    with_traffic(fleet, cut)
    entry = lead.said("rank_lost")[lost]
    print(f"requests given to the other replica: {entry['requests']}")
    assert entry["cause"] == "its connection broke"
    assert len(lead.said("rank_lost")) == lost + 1
    assert "registering_again" in fleet.far.log
    serves_again(fleet)


def arrivals(fleet: Fleet) -> int:
    """How often a replica came, or came back in time."""
    return sum(len(fleet.coordinator.said(e)) for e in ("ranks_registered", "rank_back"))


def serves_again(fleet: Fleet) -> None:
    """The replica on the second host gets requests, and answers them."""
    before = arrivals(fleet)
    fleet.near.worker.suspend()
    try:
        with_traffic(fleet, lambda: None)
    finally:
        fleet.near.worker.resume()
    seconds_until(lambda: arrivals(fleet) > before, 30)


def test_a_client_behind_a_cut_is_told_at_once_and_comes_back_by_itself(fleet):
    async def run() -> None:
        with fleet.second.entered():
            async with client_of(fleet.coordinator) as client:
                (expected,) = await asyncio.gather(ask(client, PROMPTS[0], TOKENS))
                with fleet.wire.cut():
                    began = time.monotonic()
                    with pytest.raises(Disconnected) as failed:
                        await asyncio.wait_for(ask(client, PROMPTS[1], TOKENS), 20)
                    noticed = time.monotonic() - began
                    assert failed.value.retryable
                    with pytest.raises(Disconnected):
                        await ask(client, PROMPTS[1], TOKENS)
                began = time.monotonic()
                reply = await retried(client)
                print(f"client: told after {noticed:.1f} s, ", end="")
                print(f"served {time.monotonic() - began:.1f} s after the cut")
                assert reply["generated_tokens"] == expected["generated_tokens"]

    before = arrivals(fleet)
    asyncio.run(run())
    seconds_until(lambda: arrivals(fleet) > before, 30)


async def retried(client: InferenceClient) -> dict:
    """The answer to a request that is sent again until there is one."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return await asyncio.wait_for(ask(client, PROMPTS[0], TOKENS), 20)
        except Disconnected:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(("delay", "loss"), [(0.05, 0.0), (0.02, 0.05)])
def test_a_slow_network_that_loses_packets_costs_no_request(fleet, delay, loss):
    lost = len(fleet.coordinator.said("rank_lost"))

    def disturb() -> None:
        with fleet.wire.disturbed(delay, loss):
            time.sleep(6)

    with_traffic(fleet, disturb)
    breaks = len(fleet.coordinator.said("rank_lost")) - lost
    print(f"delay {delay:g} s, loss {loss:.0%}: the replica was lost {breaks} times")


def test_one_job_of_two_nodes_serves(network, tmp_path):
    """torchrun on each host, with the job's own coordinator on the first."""
    first, second, _ = network
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(started(Job, tmp_path / host.name, node(n, first), host.run))
            for n, host in enumerate((first, second))
        ]
        (url,) = nodes[0].await_ready()
        assert url.startswith(f"http://{first.address}:")
        with first.entered(), OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            answers = [complete(client, prompt) for prompt in PROMPTS[:6]]
            assert [complete(client, prompt) for prompt in PROMPTS[:6]] == answers
        for each in nodes:
            each.process.send_signal(signal.SIGINT)
        for each in nodes:
            each.process.wait(timeout=30)
    schedule = json.loads((nodes[0].folder / "schedule.json").read_text())
    assert {record["rank_index"] for record in schedule["records"]} == {0, 1}


def node(rank: int, first: Host) -> list:
    """The command of one of two nodes."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={rank}"),
        *("--nproc-per-node=1", f"--master-addr={first.address}", "--master-port=29400"),
        *(TOOLS / "run_dynamic_text_generation_server.py", "--device=cpu", "--port=0"),
        *("--host=0.0.0.0", "--frontend-replicas=1", "--url-file=urls.json"),
        "--coordinator-schedule-output=schedule.json",
    ]


def complete(client: OpenAI, prompt: list[int]) -> list[int]:
    """A greedy answer."""
    completion = client.completions.create(
        model="megatron", prompt=prompt, max_tokens=TOKENS, temperature=0
    )
    return completion.choices[0].generation_token_ids
