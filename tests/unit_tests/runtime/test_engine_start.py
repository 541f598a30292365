"""How an engine's end starts and ends: ranks are dummy engines, process groups are made up.

Each rank lives in a thread of its own with its own event loop, against a coordinator's loop in
another; no process is started.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq
from dummy_engine import (
    BLOCK,
    LRU,
    DummyContext,
    DummyEngine,
    released_bookkeep,
    released_reset,
)
from live_coordinator import Running
from megatron.core.inference.config import PrefixCachingCoordinatorPolicy
from megatron.core.inference.engines.dynamic_engine import EngineState
from megatron.core.inference.sampling_params import SamplingParams

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.lifecycle import FleetState
from megatron.core.inference.coordinator.runtime import (
    addresses,
    engine_endings,
    engine_start,
    engine_step,
    keys,
    sockets,
    wire,
)
from megatron.core.inference.coordinator.runtime.client import InferenceClient
from megatron.core.inference.coordinator.runtime.link import GRACE_SECONDS
from megatron.core.inference.coordinator.runtime.process import CoordinatorDied, bind
from megatron.core.inference.coordinator.settings import (
    CoordinatorSettings,
    FleetSettings,
    RoutingSettings,
)

SECONDS = 10
"""Until a test that waits for something gives up."""


class Group:
    """One rank's view of a process group whose ranks are threads."""

    def __init__(self, ranks: list[int], rank: int, boxes: dict[int, Queue]):
        self.ranks, self.rank, self._boxes = ranks, ranks.index(rank), boxes

    def broadcast(self, box: list, src: int) -> None:
        if self.ranks[self.rank] == src:
            for other in set(self.ranks) - {src}:
                self._boxes[other].put(list(box))
        else:
            box[:] = self._boxes[self.ranks[self.rank]].get(timeout=SECONDS)


def make_groups(dp: int = 1, tp: int = 1, ep: int = 1) -> list[SimpleNamespace]:
    """The process groups of dp x tp ranks, tensor-parallel ranks adjacent."""
    grid = [[replica * tp + shard for shard in range(tp)] for replica in range(dp)]
    layout = {
        "tp": grid,
        "mp": grid,
        "pp": [[rank] for row in grid for rank in row],
        "dp": [list(column) for column in zip(*grid, strict=True)],
        "ep": [[rank] for row in grid for rank in row],
    }
    if ep > 1:
        layout["ep"] = layout["dp"]
    found: dict[int, dict[str, Group]] = {rank: {} for row in grid for rank in row}
    for name, groups in layout.items():
        for ranks in groups:
            boxes: dict[int, Queue] = {rank: Queue() for rank in ranks}
            for rank in ranks:
                found[rank][name] = Group(ranks, rank, boxes)
    return [SimpleNamespace(**found[rank]) for rank in sorted(found)]


@pytest.fixture(autouse=True)
def _made_up_groups(monkeypatch) -> None:
    monkeypatch.setattr(engine_start, "get_pg_rank", lambda group: group.rank)
    monkeypatch.setattr(engine_start, "get_pg_size", lambda group: len(group.ranks) if group else 1)
    monkeypatch.setattr(engine_start, "get_pg_src_rank", lambda group: group.ranks[0])
    monkeypatch.setattr(
        torch.distributed,
        "broadcast_object_list",
        lambda box, src, group: group.broadcast(box, src),
    )
    monkeypatch.setattr(
        torch.distributed,
        "all_gather_object",
        lambda found, value, group: found.__setitem__(slice(None), [value] * len(group.ranks)),
    )
    monkeypatch.setattr(torch.distributed, "group", SimpleNamespace(WORLD=None))
    # What other tests of this process leave behind; a port may be another coordinator's by now.
    monkeypatch.setattr(engine_start, "_parsed_arguments", dict)
    monkeypatch.setattr(engine_start, "_chosen_settings", None)
    monkeypatch.setattr(keys, "_rings", {})
    monkeypatch.setattr(engine_step, "_released_bookkeep", released_bookkeep)
    monkeypatch.setattr(engine_endings, "_released_reset", released_reset)
    monkeypatch.setattr(engine_start, "_REGISTER_SECONDS", 5.0)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")


@contextmanager
def running(**settings: Any) -> Iterator[Running]:
    live = Running(**settings)
    try:
        yield live
    finally:
        live.close()


@contextmanager
def started(engines: list[DummyEngine], **start: Any) -> Iterator[list[str]]:
    """All engines started, each in a thread with an event loop, and running; ended at the end.

    Yields:
        The coordinator's address as each engine was told it.
    """
    ready: Queue = Queue()
    end = threading.Event()

    async def live(engine: DummyEngine) -> None:
        try:
            ready.put((engine, await engine.start(**start)))
        except BaseException as error:
            ready.put((engine, error))
            raise
        while not end.is_set() and not engine.engine_loop_task.done():
            await asyncio.sleep(0.005)
        engine.engine_loop_task.cancel()
        await asyncio.wait({engine.engine_loop_task})
        if not engine.engine_loop_task.cancelled():
            engine.engine_loop_task.result()

    with ThreadPoolExecutor(len(engines)) as pool:
        futures = [pool.submit(asyncio.run, live(engine)) for engine in engines]
        try:
            addresses = dict(ready.get(timeout=SECONDS) for _ in engines)
            for address in addresses.values():
                if isinstance(address, BaseException):
                    raise address
            yield [addresses[engine] for engine in engines]
        finally:
            for engine in engines:  # those that wait for their group's first rank give up
                engine.end.ending = True
            end.set()
        for future in futures:
            future.result(SECONDS)


async def asked(address: str, *prompts: Any, act: Callable[[InferenceClient], None] | None = None):
    """Answers to prompts, submitted at once; then `act` may send signals."""
    client = InferenceClient(address, connect_timeout=10)
    client.start(asyncio.get_running_loop())
    try:
        futures = [client.add_request(p, SamplingParams(termination_id=-1)) for p in prompts]
        replies = await asyncio.wait_for(asyncio.gather(*futures), SECONDS)
        if act is not None:
            act(client)
        return replies
    finally:
        client.stop()


def test_two_replicas_register_answer_and_take_their_leave():
    engines = [DummyEngine(groups) for groups in make_groups(dp=2)]
    for engine, token in zip(engines, b"ab", strict=True):
        engine.answer = token
    start = {"launch_inference_coordinator": False, "hostname": "127.0.0.1"}
    with running(expected_ranks=2) as live:
        with started(engines, inference_coordinator_port=live.port, **start) as addresses:
            assert addresses == [live.address] * 2
            ranks = sorted(
                (r.number, r.max_requests, r.total_blocks) for r in live.loop.core.fleet.ranks
            )
            assert ranks == [(0, 8, 100), (1, 8, 100)]
            replies = asyncio.run(asked(live.address, "one", "two", [5] * 3, [6] * 3))
        assert sorted({reply["generated_text"] for reply in replies}) == ["aa", "bb"]
        assert all(reply["status"] == "COMPLETED" for reply in replies)
        wait_for(lambda: live.counts["rank_left"] == 2)
        assert live.counts["message_refused"] == live.counts["reply_dropped"] == 0
    assert [engine.state for engine in engines] == [EngineState.STOPPED] * 2


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(int(SECONDS / 0.01)):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not happen")


def test_signals_stop_all_replicas_and_they_disconnect():
    engines = [DummyEngine(groups) for groups in make_groups(dp=2)]

    def stop(client: InferenceClient) -> None:
        client.pause_engines()
        client.suspend_engines()
        client.resume_engines()
        client.set_generation_epoch(9)
        client.stop_engines()

    start = {"launch_inference_coordinator": False, "hostname": "127.0.0.1"}
    with running(expected_ranks=2) as live:
        with started(engines, inference_coordinator_port=live.port, **start):
            asyncio.run(asked(live.address, "hi", act=stop))
            wait_for(lambda: all(e.state is EngineState.STOPPED for e in engines))
        wait_for(lambda: live.counts["rank_left"] == 2)
        assert live.counts["rank_lost"] == 0  # they said so; it was not found out by a broken send
    for engine in engines:
        assert engine.did[-2:] == ["suspend", "resume"]
        assert (engine._generation_epoch, engine.end.cache.epoch) == (9, 2)


@pytest.mark.parametrize(("caching", "hybrid"), [(True, False), (False, False), (True, True)])
def test_a_registration_tells_what_the_coordinator_must_know(caching, hybrid, caplog):
    """A hybrid model without a cache of its Mamba states holds nothing that spares prefill."""
    context = zmq.Context()
    router = sockets.router(context)
    address = bind(router, "127.0.0.1", 0)
    engines = [DummyEngine(groups, DummyContext(caching)) for groups in make_groups(dp=2)]
    for engine in engines:
        engine.context.is_hybrid_model = hybrid
    received: list[tuple[bytes, m.Register]] = []

    def acknowledge() -> None:
        while len(received) < 2:
            assert router.poll(10_000)
            peer, *frames = router.recv_multipart()
            message = wire.decode_for_coordinator(frames)
            if isinstance(message, m.Register):  # not what a registered one has to tell
                ack = m.RegisterAck(len(received), 1, 3, FleetState.RUNNING)
                received.append((peer, message))
                router.send_multipart([peer, *wire.encode(ack)])

    thread = threading.Thread(target=acknowledge)
    thread.start()
    try:
        start = {"launch_inference_coordinator": False, "hostname": "127.0.0.1"}
        with started(engines, inference_coordinator_port=int(address.rsplit(":", 1)[1]), **start):
            assert [engine.end.cache.epoch for engine in engines] == [3, 3]
    finally:
        thread.join(SECONDS)
        context.destroy(linger=0)
    (_, first), (_, second) = sorted(received, key=lambda each: each[1].dp_rank)
    assert (first.dp_rank, second.dp_rank) == (0, 1)
    assert first.replica == second.replica
    assert first.replica.startswith("test-")
    block = BLOCK if caching and not hybrid else 0
    assert caplog.text.count("prefix_caching_spares_nothing") == 2 * hybrid
    assert first == m.Register(1, first.replica, 0, 0, 8, block, 100, "lru")
    assert sorted(peer for peer, _ in received) == [
        f"engine-{first.replica}-{rank}-1".encode() for rank in (0, 1)
    ]


def test_two_jobs_on_one_coordinator_do_not_collide():
    start = {"launch_inference_coordinator": False, "hostname": "127.0.0.1"}
    first, second = (DummyEngine(*make_groups()) for _ in range(2))
    with running() as live:
        start["inference_coordinator_port"] = live.port
        with started([first], **start), started([second], **start):
            assert len(live.loop.core.fleet.ranks) == 2


class DummyProcess:
    """Stands in for the coordinator's process: a loop in a thread."""

    made: list["DummyProcess"]

    def __init__(self, settings: Any, tokenizer: Any):
        self.made.append(self)
        self.settings, self.tokenizer = settings, tokenizer
        expected = settings.coordinator.expected_ranks
        self.live = Running(lock=settings.lock, expected_ranks=expected)
        self.address = self.live.address
        self.process = object()
        self.died: str | None = None

    def check(self) -> None:
        if self.died is not None:
            raise CoordinatorDied(self.died)


@pytest.fixture
def processes(monkeypatch) -> Iterator[list[DummyProcess]]:
    monkeypatch.setattr(DummyProcess, "made", [], raising=False)
    monkeypatch.setattr(engine_start, "CoordinatorProcess", DummyProcess)
    yield DummyProcess.made
    for process in DummyProcess.made:
        process.live.close()


def test_the_first_rank_alone_starts_the_coordinator_and_the_others_are_told(
    processes, monkeypatch
):
    chosen = RoutingSettings(load_beta=0.25)
    monkeypatch.setattr(engine_start, "_chosen_settings", chosen)
    engines = [DummyEngine(groups) for groups in make_groups(dp=2)]
    with started(
        engines, inference_coordinator_port=5123, coordinator_schedule_output_path="decisions.json"
    ) as addresses:
        (process,) = processes
        assert addresses == [process.address] * 2
        assert engines[0].end.process is process
        assert engines[0].inference_coordinator_process is process.process
        assert engines[1].end.process is None
        assert [engine.is_dp_coordinator for engine in engines] == [True, False]
        assert process.tokenizer is engines[0].controller.tokenizer
        settings = process.settings
        assert (settings.host, settings.port) == ("127.0.0.1", 5123)
        assert settings.schedule_path == "decisions.json"
        assert settings.coordinator == CoordinatorSettings(
            routing=chosen,
            expected_ranks=2,
            prefix_caching=True,
            block_size_tokens=BLOCK,
            max_requests=8,
            eviction=LRU,
            deterministic=False,
        )


def test_without_a_port_or_files_the_system_chooses_and_nothing_is_written(processes):
    with started([DummyEngine(*make_groups())]):
        settings = processes[0].settings
    assert (settings.port, settings.schedule_path, settings.recording.record) == (0, None, "")


def run_until_it_dies(engine: DummyEngine, processes: list["DummyProcess"]) -> None:
    with started([engine]):
        processes[0].died = "killed by SIGKILL"
        wait_for(lambda: engine.engine_loop_task.done())


def test_a_coordinator_process_that_dies_ends_the_engine_with_its_error(processes):
    engine = DummyEngine(*make_groups())
    with pytest.raises(CoordinatorDied, match=r"^killed by SIGKILL$"):
        run_until_it_dies(engine, processes)
    assert engine.state is EngineState.STOPPED


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 2)])
def test_a_coordinator_that_cannot_start_ends_the_start_on_every_rank(dp, tp, monkeypatch):
    def refuse(settings: Any, tokenizer: Any) -> None:
        raise CoordinatorDied("port 5123 on 127.0.0.1 is in use")

    monkeypatch.setattr(engine_start, "CoordinatorProcess", refuse)
    engines = [DummyEngine(groups) for groups in make_groups(dp, tp)]
    with ThreadPoolExecutor(len(engines)) as pool:
        starts = [pool.submit(asyncio.run, engine.start()) for engine in engines]
        failures = [str(start.exception(SECONDS)) for start in starts]
    assert failures == ["port 5123 on 127.0.0.1 is in use"] * len(engines)


@pytest.mark.parametrize(
    ("hostname", "elsewhere", "binds", "own"),
    [
        (None, False, "127.0.0.1", "127.0.0.1"),
        (None, True, "10.1.1.7", "10.1.1.7"),
        ("127.0.0.3", True, "127.0.0.3", "127.0.0.3"),
        # Given once for all machines: it is the coordinator's, and here it leads there.
        ("192.0.2.1", True, "192.0.2.1", "10.1.1.7"),
    ],
)
def test_ranks_on_one_machine_alone_meet_on_loopback(
    hostname, elsewhere, binds, own, processes, monkeypatch
):
    """Ray's workers are not told how many of them are on a machine."""
    everybody = SimpleNamespace(ranks=[0, 1], rank=0)
    monkeypatch.setattr(torch.distributed, "group", SimpleNamespace(WORLD=everybody))
    monkeypatch.setattr(
        torch.distributed,
        "all_gather_object",
        lambda found, value, group: found.__setitem__(
            slice(None), [value, "another machine" if elsewhere else value]
        ),
    )
    leaders = []

    class Leader:
        invitation = None

        def __init__(self, members: int, host: str | None):
            leaders.append(host)

        def wait_for_members(self) -> None:
            pass

        def close(self) -> None:
            pass

    monkeypatch.setattr(engine_start, "GroupLeader", Leader)
    monkeypatch.setattr(engine_start, "_from_first", lambda value, group: value)
    monkeypatch.setattr(addresses, "_address_towards", lambda host: "10.1.1.7")
    monkeypatch.setattr(addresses, "other_addresses", lambda: ["10.1.1.7"])
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "10.1.1.1"}.items():
        monkeypatch.setenv(name, value)
    engine = DummyEngine(*make_groups())
    with started([engine], hostname=hostname):
        assert processes[0].settings.host == binds
        assert engine.end.host == own
        assert leaders == [own if elsewhere else None]


@pytest.mark.parametrize(("asked_for", "insists"), [(None, False), (41521, True), (41522, False)])
def test_a_port_of_the_command_line_is_insisted_on(asked_for, insists, processes, monkeypatch):
    parsed = {"inference_coordinator_port": asked_for}
    monkeypatch.setattr(engine_start, "_parsed_arguments", lambda: parsed)
    with started([DummyEngine(*make_groups())], inference_coordinator_port=41521):
        settings = processes[0].settings
    assert (settings.port, settings.insists_on_port) == (41521, insists)


# --- what the engine's own configuration says ---------------------------------------------------


def of_config(policy: str = "load_balanced", alpha: float = 0.5) -> RoutingSettings:
    context = DummyContext()
    context.prefix_caching_coordinator_policy = PrefixCachingCoordinatorPolicy(policy)
    context.prefix_caching_routing_alpha = alpha
    return engine_start._routing_of(context)


def test_an_untouched_config_leaves_the_default(monkeypatch):
    assert of_config() == RoutingSettings()


@pytest.mark.parametrize("policy", ["first_prefix_block", "longest_prefix"])
def test_a_policy_of_the_config_counts(policy):
    assert of_config(policy) == RoutingSettings(coordinator_policy=policy)


def test_an_alpha_that_nobody_reads_is_told(caplog, monkeypatch):
    assert of_config(alpha=0.9) == RoutingSettings(routing_alpha=0.9)
    assert "routing-alpha is read by" in caplog.text
    caplog.clear()
    parsed = {"cost_policy": "free_capacity_weighted"}
    monkeypatch.setattr(engine_start, "_parsed_arguments", lambda: parsed)
    assert of_config(alpha=0.9).routing_alpha == 0.9
    assert caplog.text == ""


def test_flags_and_settings_in_code_win_over_the_config(monkeypatch):
    parsed = {"coordinator_policy": "load_balanced", "routing_alpha": 0.2}
    monkeypatch.setattr(engine_start, "_parsed_arguments", lambda: parsed)
    assert of_config("first_prefix_block", 0.9) == RoutingSettings(**parsed)
    chosen = RoutingSettings()
    monkeypatch.setattr(engine_start, "_chosen_settings", chosen)
    assert of_config("first_prefix_block", 0.9) is chosen


# --- what the replicas draw ----------------------------------------------------------------------


def seeds(engines: list[DummyEngine], address: str) -> list[int]:
    with started(engines, coordinator_address=address):
        return [engine.controller.sampling_rng.initial_seed() for engine in engines]


def test_every_replica_draws_its_own_samples_and_its_ranks_the_same():
    with running() as live:
        found = [seeds([DummyEngine(g) for g in make_groups(dp=2, tp=2)], live.address)]
        again = DummyEngine(*make_groups())
        found += [seeds([again], live.address), seeds([again], live.address)]
    flat = [seed for each in found for seed in each]
    assert flat[0] == flat[1]
    assert flat[2] == flat[3]
    assert len({*flat}) == 4


def test_a_run_that_can_be_repeated_draws_the_same_again(monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    found = []
    for _ in range(2):
        with running(expected_ranks=2, deterministic=True) as live:
            found.append(seeds([DummyEngine(g) for g in make_groups(dp=2)], live.address))
    assert found[0] == found[1]
    assert len({*found[0]}) == 2


def test_replicas_that_are_meant_to_draw_alike_are_left_alone():
    engine = DummyEngine(*make_groups())
    engine.context.config.offset_sampling_seed_by_dp_rank = False
    before = engine.controller.sampling_rng.initial_seed()
    with running() as live:
        assert seeds([engine], live.address) == [before]


@pytest.mark.parametrize("machines", [["one", "one"], ["one", "another"]])
def test_a_group_meets_in_a_folder_on_one_machine_and_with_keys_between_two(machines, monkeypatch):
    monkeypatch.setattr(
        torch.distributed,
        "all_gather_object",
        lambda found, value, group: found.__setitem__(slice(None), machines),
    )
    engines = [DummyEngine(groups) for groups in make_groups(tp=2)]
    with (
        running() as live,
        started(
            engines,
            hostname="127.0.0.1",
            launch_inference_coordinator=False,
            inference_coordinator_port=live.port,
        ),
    ):
        invitation = engines[0].end.leader.invitation
        apart = len(set(machines)) > 1
        assert invitation.address.startswith("tcp://127.0.0.1:" if apart else "ipc:///")
        assert (invitation.credentials is not None) is apart


def test_a_model_parallel_group_sees_the_same_and_answers_once():
    engines = [DummyEngine(groups) for groups in make_groups(dp=2, tp=2)]
    start = {"launch_inference_coordinator": False, "hostname": "127.0.0.1"}
    with running(expected_ranks=2) as live:
        with started(engines, inference_coordinator_port=live.port, **start) as addresses:
            assert addresses == [live.address] * 4
            assert [e.end.link is not None for e in engines] == [True, False] * 2
            assert [e.is_mp_coordinator for e in engines] == [True, False] * 2
            prompts = [[n] * 6 for n in range(20)]
            replies = asyncio.run(
                asked(live.address, *prompts, act=lambda c: c.set_generation_epoch(3))
            )
            assert len(replies) == len(prompts)
            wait_for(lambda: all(e._generation_epoch == 3 for e in engines))
            pinged = live.loop.core._ticks
            wait_for(lambda: live.loop.core._ticks > pinged)
        assert live.counts["reply_dropped"] == live.counts["message_refused"] == 0
        assert live.counts["reply_from_stranger"] == live.counts["pong_from_stranger"] == 0
    for first, second in (engines[:2], engines[2:]):
        assert first.did == second.did
        assert first.did
        assert second.end.cache.found == {}
    assert sum(len(engine.did) for engine in engines) == 2 * len(prompts)
    assert [engine.end.cache.epoch for engine in engines] == [1] * 4


@pytest.mark.parametrize(("world", "ep", "expected"), [(1, 1, 0), (2, 1, 1), (2, 2, 2)])
def test_barriers_are_made_for_groups_of_more_than_one(world, ep, expected, processes, monkeypatch):
    opened = []

    def channel(group: Group, host: str) -> object | None:
        assert host == "127.0.0.1"
        if len(group.ranks) == 1:
            return None
        opened.append(group)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(engine_start, "_channel", channel)
    everybody = SimpleNamespace(ranks=range(world))
    monkeypatch.setattr(torch.distributed, "group", SimpleNamespace(WORLD=everybody))
    engines = [DummyEngine(groups) for groups in make_groups(dp=world, ep=ep)]
    with started(engines, hostname="127.0.0.1"):
        assert [(engine.ep_world_size, engine.ep_rank) for engine in engines] == [
            (ep, rank if ep > 1 else 0) for rank in range(world)
        ]
        for engine in engines:
            assert (engine.context.ep_communicator is not None) is (ep > 1)
            assert hasattr(engine, "world_zmq_communicator") is (world > 1)
    assert len(opened) == world * expected
    assert opened.count(everybody) == (world if world > 1 else 0)


# --- a coordinator that is there already --------------------------------------------------------


@pytest.mark.parametrize("linked_alone", [True, False])
def test_a_job_joins_a_coordinator_that_is_there_and_starts_none(processes, linked_alone):
    engines = [DummyEngine(groups) for groups in make_groups(dp=2, tp=1 if linked_alone else 2)]
    with running() as live:
        with started(engines, coordinator_address=live.address) as addresses:
            assert addresses == [live.address] * len(engines)
            assert len(live.loop.core.fleet.ranks) == 2
            graces = {e.end.link._grace for e in engines if e.end.link is not None}
            assert graces == {engine_start.RECONNECT_SECONDS}
            assert len(asyncio.run(asked(live.address, *([n] * 5 for n in range(6))))) == 6
        wait_for(lambda: live.counts["rank_left"] == 2)
    assert processes == []


def test_a_coordinator_of_the_job_itself_is_soon_given_up(processes):
    engine = DummyEngine(*make_groups())
    with started([engine]):
        assert engine.end.link._grace == GRACE_SECONDS


@pytest.mark.parametrize("tp", [1, 2])
def test_who_joins_a_paused_fleet_is_paused_and_serves_once_the_fleet_goes_on(tp):
    engines = [DummyEngine(groups) for groups in make_groups(tp=tp)]
    states = []

    async def run(address: str) -> None:
        client = InferenceClient(address, connect_timeout=10)
        client.start(asyncio.get_running_loop())
        client.set_generation_epoch(7)
        client.pause_engines()
        await until(lambda: live.loop.core.fleet.state is FleetState.PAUSED)
        with started(engines, coordinator_address=address):
            await until(lambda: all(e.state is EngineState.PAUSED for e in engines))
            await until(lambda: all(e._generation_epoch == 7 for e in engines))
            states.append([e.end.cache.epoch for e in engines])
            future = client.add_request([1, 2, 3], SamplingParams(termination_id=-1))
            await until(lambda: all(e.requests for e in engines))
            await asyncio.sleep(0.1)
            assert not future.done()
            client.unpause_engines()
            assert (await asyncio.wait_for(future, SECONDS))["status"] == "COMPLETED"
            await until(lambda: all(e.state is EngineState.RUNNING for e in engines))
        client.stop()

    with running() as live:
        asyncio.run(run(live.address))
    assert states == [[1] * tp]


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(int(SECONDS / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


@pytest.mark.parametrize("tp", [1, 2])
def test_a_coordinator_that_is_started_again_gets_its_engines_back(tp):
    engines = [DummyEngine(groups) for groups in make_groups(dp=2, tp=tp)]
    first = Running(expected_ranks=2)
    try:
        with started(engines, coordinator_address=first.address):
            asyncio.run(asked(first.address, "hi"))
            first.close()
            with running(port=first.port, expected_ranks=2) as second:
                wait_for(lambda: len(second.loop.core.fleet.ranks) == 2)
                replies = asyncio.run(asked(second.address, *([n] * 5 for n in range(6))))
                assert [reply["status"] for reply in replies] == ["COMPLETED"] * 6
                assert {r.generation for r in second.loop.core.fleet.ranks} == {1}
                assert second.counts["reply_dropped"] == 0
    finally:
        first.close()
    assert all("reset" not in e.did for e in engines)  # nothing was running


@pytest.mark.parametrize("tp", [1, 2])
def test_an_engine_that_hung_comes_back_as_a_new_generation(tp):
    """It hangs with a request: another replica answers that, and the late answer is dropped."""
    hanging, other = ([DummyEngine(groups) for groups in make_groups(tp=tp)] for _ in range(2))
    go_on = threading.Event()
    hung = threading.Event()

    async def hang(*finished: int) -> dict:
        hung.set()
        await asyncio.to_thread(lambda: None)
        go_on.wait(SECONDS)
        del hanging[0].step
        return await hanging[0].step(*finished)

    hanging[0].step = hang  # type: ignore[method-assign]
    with running(fleet=FleetSettings(hung_timeout=3, first_answer_timeout=0)) as live:
        with started(hanging, coordinator_address=live.address):
            number = next(iter(live.loop.core.fleet.ranks)).number

            async def run() -> list[dict]:
                client = InferenceClient(live.address, connect_timeout=10)
                client.start(asyncio.get_running_loop())
                first = client.add_request([1, 2, 3], SamplingParams(termination_id=-1))
                await until(hung.is_set)
                with started(other, coordinator_address=live.address):
                    reply = await asyncio.wait_for(first, SECONDS)
                    assert live.counts["rank_lost"] == 1
                    go_on.set()
                    await until(lambda: len(live.loop.core.fleet.ranks) == 2)
                await until(lambda: len(live.loop.core.fleet.ranks) == 1)
                second = client.add_request([4, 5, 6], SamplingParams(termination_id=-1))
                replies = [reply, await asyncio.wait_for(second, SECONDS)]
                client.stop()
                return replies

            replies = asyncio.run(run())
            assert [reply["status"] for reply in replies] == ["COMPLETED"] * 2
            rank = next(iter(live.loop.core.fleet.ranks))
            assert (rank.number, rank.generation) == (number, 2)
        assert live.counts["reply_from_stranger"] == 1
        assert live.counts["reply_dropped"] == 0
    assert hanging[0].did == ["add 0", "add 2"]
    assert other[0].did == ["add 1"]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_job_that_leaves_answers_what_it_has_and_nothing_is_tried_again(tp):
    leaving, staying = ([DummyEngine(groups) for groups in make_groups(tp=tp)] for _ in range(2))
    with (
        running() as live,
        started(staying, coordinator_address=live.address),
        started(leaving, coordinator_address=live.address),
    ):

        async def run() -> list[dict]:
            client = InferenceClient(live.address, connect_timeout=10)
            client.start(asyncio.get_running_loop())
            params = SamplingParams(termination_id=-1)
            futures = []
            for n in range(60):
                futures.append(client.add_request([n] * 5, params))
                if n == 20:
                    for engine in leaving:
                        engine.end.leaving = True
                await asyncio.sleep(0.002)
            replies = await asyncio.wait_for(asyncio.gather(*futures), SECONDS)
            client.stop()
            return replies

        replies = asyncio.run(run())
        assert [reply["status"] for reply in replies] == ["COMPLETED"] * 60
        wait_for(lambda: all(e.state is EngineState.STOPPED for e in leaving))
        wait_for(lambda: live.counts["rank_left"] == 1)
        assert live.counts["rank_draining"] == 1
        assert live.counts["rank_lost"] == live.counts["reply_dropped"] == 0
        assert {e.state for e in staying} == {EngineState.RUNNING}
    assert len({tuple(e.did) for e in leaving}) == 1
    assert leaving[0].did
    assert len(leaving[0].did) + len(staying[0].did) == 60


# --- ending --------------------------------------------------------------------------------------


def test_shutdown_lets_go_of_everything_and_may_be_called_again():
    async def run(port: int) -> DummyEngine:
        engine = DummyEngine(*make_groups())
        await engine.start(port, launch_inference_coordinator=False, hostname="127.0.0.1")
        link = engine.end.link
        await asyncio.sleep(0)
        engine.engine_loop_task.cancel()
        await asyncio.wait({engine.engine_loop_task})
        assert link._connection.watch.closed
        assert link.socket.closed
        assert engine.zmq_context.closed
        assert engine.state is EngineState.STOPPED
        await engine.shutdown()
        return engine

    with running(expected_ranks=1) as live:
        asyncio.run(run(live.port))
        wait_for(lambda: live.counts["rank_left"] == 1)
        assert not len(live.loop.core.fleet.ranks)


def test_shutdown_of_an_engine_that_never_started_is_left_to_the_released_one(monkeypatch):
    called = []

    async def released(engine: DummyEngine) -> None:
        called.append(engine)

    monkeypatch.setattr(engine_endings, "_released_shutdown", released)
    engine = DummyEngine()
    asyncio.run(engine.shutdown())
    assert called == [engine]
