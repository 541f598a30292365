"""The coordinator as a process: how it comes up, what it leaves behind, and how it ends.

All processes come from the fork server of this process, whose imports take seconds once.
"""

import asyncio
import gc
import json
import logging
import multiprocessing
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest
import zmq
from megatron.core.inference.sampling_params import SamplingParams

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.hashing import block_hashes, pack_hashes
from megatron.core.inference.coordinator.lifecycle import Signal
from megatron.core.inference.coordinator.runtime import process as coordinator_process
from megatron.core.inference.coordinator.runtime import sockets, wire
from megatron.core.inference.coordinator.runtime.client import InferenceClient, RequestFailed
from megatron.core.inference.coordinator.runtime.fork_server import warm_up
from megatron.core.inference.coordinator.runtime.link import CoordinatorLink
from megatron.core.inference.coordinator.runtime.loop import CoordinatorLoop
from megatron.core.inference.coordinator.runtime.process import (
    CoordinatorDied,
    CoordinatorProcess,
    ProcessSettings,
    run,
)
from megatron.core.inference.coordinator.settings import (
    CoordinatorSettings,
    FleetSettings,
    RecordSettings,
)

BLOCK = 4
WAIT_MS = 5000


@pytest.fixture(scope="module")
def orphan_to_be() -> Iterator[tuple[psutil.Process, psutil.Process]]:
    """A process, and the coordinator that it has started.

    That process needs a fork server of its own, which imports in the background from the first
    test on, while the others run.
    """
    context = warm_up()
    ours, theirs = context.Pipe()
    parent = context.Process(target=_start_one, args=(theirs,))
    parent.start()
    theirs.close()
    processes: list[psutil.Process] = []

    def started() -> tuple[psutil.Process, psutil.Process]:
        assert ours.poll(50), "it did not come up"
        processes.extend(psutil.Process(pid) for pid in (parent.pid, ours.recv()))
        return processes[0], processes[1]

    yield started
    parent.kill()
    parent.join()
    for process in processes:
        if process.is_running():
            process.kill()


def _report_collector(pipe: Connection) -> None:
    """A coordinator that ends at once, having said how its garbage collector is set up."""
    CoordinatorLoop.run = lambda self: pipe.send((gc.get_threshold(), gc.get_freeze_count()))
    run(ProcessSettings(), None, None)


def _log_what_a_client_made_up(file: str) -> None:
    """A coordinator whose standard error is a file, and in which something goes wrong."""

    def fail(loop: CoordinatorLoop) -> None:
        logging.getLogger("x").error("bad\n%s", "\x1b[31mred")
        raise ValueError("\n2030-01-01 coordinator INFO stopped")

    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), 2)
    CoordinatorLoop.run = fail
    run(ProcessSettings(), None, None)


def _suspend_and_hang(address: str) -> None:
    """A trainer that suspends the fleet, and never gets to the end of its update."""

    async def trainer() -> None:
        client = InferenceClient(address, connect_timeout=50)
        client.start(asyncio.get_running_loop())
        client.pause_engines()
        client.suspend_engines()
        await asyncio.sleep(600)

    asyncio.run(trainer())


def _start_one(pipe: Connection) -> None:
    coordinator = CoordinatorProcess(ProcessSettings())
    pipe.send(coordinator.process.pid)
    signal.pause()


@contextmanager
def started(tokenizer: Any = None, **settings: Any) -> Iterator[CoordinatorProcess]:
    coordinator = CoordinatorProcess(ProcessSettings(**settings), tokenizer)
    try:
        yield coordinator
    finally:
        coordinator.stop()


@pytest.fixture(scope="module")
def shared(orphan_to_be) -> Iterator[CoordinatorProcess]:
    with started() as coordinator:
        yield coordinator


class Peer:
    """A socket of its own that talks to a coordinator."""

    def __init__(self, coordinator: CoordinatorProcess, name: bytes, pulse: sockets.Pulse):
        self._context = zmq.Context()
        self.socket = sockets.dealer(self._context, coordinator.address, name, pulse=pulse)

    def say(self, message: m.ToCoordinator) -> None:
        self.socket.send_multipart(wire.encode(message))

    def hear(self, kind: type) -> Any:
        while True:
            assert self.socket.poll(WAIT_MS), "nothing came"
            message = wire.decode_from_coordinator(self.socket.recv_multipart())
            if isinstance(message, kind):
                return message

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextmanager
def talking(
    coordinator: CoordinatorProcess,
    name: bytes = b"peer",
    pulse: sockets.Pulse = sockets.ENGINE_PULSE,
) -> Iterator[Peer]:
    peer = Peer(coordinator, name, pulse)
    try:
        yield peer
    finally:
        peer.close()


def connect(peer: Peer) -> m.ConnectAck:
    peer.say(m.Connect(1, False))
    return peer.hear(m.ConnectAck)


def wait_until_dead(coordinator: CoordinatorProcess, seconds: float = 5) -> str:
    """What `check` says once the process has ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            coordinator.check()
        except CoordinatorDied as died:
            return str(died)
        time.sleep(0.01)
    raise AssertionError(f"still alive after {seconds} s")


# --- coming up -----------------------------------------------------------------------------------


def test_its_address_is_where_it_listens(shared):
    assert shared.address.startswith("tcp://127.0.0.1:")
    with talking(shared) as peer:
        assert connect(peer) == m.ConnectAck(1, "longest_prefix", 256, 0)
    shared.check()


def test_it_is_another_process_than_ours_and_than_the_fork_server(shared):
    fork_server = psutil.Process(shared.process.pid).parent()
    assert fork_server.ppid() == os.getpid()
    assert shared.process.pid != os.getpid()
    assert shared.process.daemon


def test_a_port_that_is_asked_for_is_the_one_it_gets(orphan_to_be):
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    with started(port=port) as coordinator:
        assert coordinator.address == f"tcp://127.0.0.1:{port}"


def test_a_host_may_be_a_name(orphan_to_be):
    with started(host="localhost") as coordinator:
        assert coordinator.address.startswith("tcp://127.0.0.1:")


def test_its_garbage_collector_does_not_look_through_what_is_old(orphan_to_be):
    ours, theirs = warm_up().Pipe()
    process = warm_up().Process(target=_report_collector, args=(theirs,))
    process.start()
    theirs.close()
    thresholds, frozen = ours.recv()
    process.join()
    assert thresholds[2] > 10**9
    assert frozen > 100_000  # megatron-core and torch


def test_settings_reach_it(orphan_to_be):
    settings = CoordinatorSettings(prefix_caching=False, block_size_tokens=None)
    with started(coordinator=settings) as coordinator, talking(coordinator) as peer:
        assert connect(peer) == m.ConnectAck(1, "load_balanced", 0, 0)


def test_a_port_in_use_is_an_error_that_says_what_to_do(orphan_to_be):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CoordinatorDied) as died:
            CoordinatorProcess(ProcessSettings(port=port))
    assert str(died.value).endswith(
        f"port {port} on 127.0.0.1 is in use: name another with --inference-coordinator-port, or "
        "leave it out and the system chooses one"
    )


def test_a_port_in_use_that_nobody_insists_on_is_another_one(caplog):
    context = zmq.Context()
    router = sockets.router(context)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = ProcessSettings(port=port, insists_on_port=False)
        address = coordinator_process._bind_or_choose(router, settings)
    context.destroy(linger=0)
    assert address.startswith("tcp://127.0.0.1:")
    assert not address.endswith(f":{port}")
    assert f"port_in_use port={port} address='{address}'" in caplog.text


def test_a_host_that_is_not_this_machine_is_an_error_that_names_it(orphan_to_be):
    with pytest.raises(CoordinatorDied, match=r"cannot bind the coordinator to 192\.0\.2\.1:0 \("):
        CoordinatorProcess(ProcessSettings(host="192.0.2.1"))


def test_what_goes_wrong_inside_arrives_with_its_text(orphan_to_be):
    with pytest.raises(CoordinatorDied, match=r"\(pid \d+\) died: AttributeError: 'str' object"):
        CoordinatorProcess(ProcessSettings(coordinator="no settings at all"))


# --- ending --------------------------------------------------------------------------------------


def test_killed_it_is_dead_and_the_text_says_by_what(orphan_to_be):
    with started() as coordinator:
        coordinator.check()
        os.kill(coordinator.process.pid, signal.SIGKILL)
        pid = coordinator.process.pid
        text = wait_until_dead(coordinator)
        assert text == f"the coordinator process (pid {pid}) died: killed by SIGKILL"
        with pytest.raises(CoordinatorDied):
            coordinator.check()


def test_a_schedule_that_cannot_be_written_is_said_at_the_start(orphan_to_be, tmp_path):
    nowhere = str(tmp_path / "no_such_folder" / "schedule.json")
    failure = pytest.raises(CoordinatorDied, match=f"FileNotFoundError: .*'{nowhere}'")
    with failure, started(schedule_path=nowhere):
        pass


def test_a_client_may_end_it(orphan_to_be):
    with started() as coordinator, talking(coordinator) as peer:
        connect(peer)
        peer.say(m.Shutdown())
        assert wait_until_dead(coordinator).endswith("died: it exited with 0")


def test_a_connection_that_breaks_while_nobody_reads_from_it_ends_nothing(orphan_to_be):
    """libzmq ends a process whose socket sends heartbeats to such a peer."""
    with started() as coordinator:
        port = int(coordinator.address.rsplit(":", 1)[1])
        for _ in range(2):
            flood = socket.create_connection(("127.0.0.1", port))
            null = b"NULL".ljust(20, b"\0")
            flood.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01" + null + bytes(32))
            ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
            flood.sendall(b"\x04" + bytes([len(ready)]) + ready)
            flood.sendall(b"\x00\x01x" * 100_000)  # more than may wait in the coordinator
            flood.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            flood.close()
            time.sleep(0.7)  # beyond a heartbeat
        coordinator.check()
        with talking(coordinator) as peer:
            connect(peer)


def test_ctrl_c_is_not_for_it(shared):
    for _ in range(2):  # torchrun may deliver it twice
        os.kill(shared.process.pid, signal.SIGINT)
    with talking(shared) as peer:
        for _ in range(3):
            connect(peer)
    shared.check()


def test_sigterm_ends_it_at_once_and_orderly(orphan_to_be):
    took = []
    for _ in range(8):  # each time at another moment of its loop
        with started() as coordinator:
            with talking(coordinator) as peer:
                connect(peer)
            began = time.monotonic()
            os.kill(coordinator.process.pid, signal.SIGTERM)
            coordinator.process.join(5)
            took.append(time.monotonic() - began)
            assert coordinator.process.exitcode == 0
    # Less than a tick of its clock; this machine may be busy once.
    assert sorted(took)[-2] < 0.9


def test_stop_ends_also_one_that_hangs(orphan_to_be):
    with started() as coordinator:
        os.kill(coordinator.process.pid, signal.SIGSTOP)
        began = time.monotonic()
        coordinator.stop(0.2)
        assert time.monotonic() - began < 15
        assert coordinator.process.exitcode == -signal.SIGKILL
        coordinator.stop()  # again does nothing


def test_one_that_stands_still_for_a_while_loses_no_client(orphan_to_be):
    async def ask_meanwhile(coordinator: CoordinatorProcess) -> str:
        client = InferenceClient(coordinator.address, connect_timeout=10)
        client.start(asyncio.get_running_loop())
        try:
            os.kill(coordinator.process.pid, signal.SIGSTOP)
            answer = client.add_request([1], SamplingParams(termination_id=-1))
            await asyncio.sleep(3)  # engines would have given it up
            os.kill(coordinator.process.pid, signal.SIGCONT)
            with pytest.raises(RequestFailed) as failed:
                await asyncio.wait_for(answer, 10)
        finally:
            client.stop()
        return failed.value.code

    at_once = CoordinatorSettings(fleet=FleetSettings(replica_wait=0))
    with started(coordinator=at_once) as coordinator:
        assert asyncio.run(ask_meanwhile(coordinator)) == "no_replica"


def test_engines_connect_anew_before_clients_would_to_one_that_stands_still(orphan_to_be):
    context = zmq.Context()
    try:
        with started() as coordinator:
            link = CoordinatorLink(context, coordinator.address, b"engine")
            assert link.register(m.Register(1, "job", 0, 0, 8, 256, 100, "lru"), 10).rank == 0
            deadline = time.monotonic() + sockets.CLIENT_PULSE.timeout_ms / 1000
            os.kill(coordinator.process.pid, signal.SIGSTOP)
            try:
                while not link.check():
                    assert time.monotonic() < deadline, "the link does not have the engines' pulse"
                    time.sleep(0.01)
            finally:
                os.kill(coordinator.process.pid, signal.SIGCONT)
    finally:
        context.destroy(linger=0)


def heard(link: CoordinatorLink, kind: type) -> Any:
    """The next message of this kind that comes over an engine's link."""
    deadline = time.monotonic() + WAIT_MS / 1000
    while time.monotonic() < deadline:
        for frames in link.drain():
            message = wire.decode_from_coordinator(frames)
            if isinstance(message, kind):
                return message
        time.sleep(0.01)
    raise AssertionError("nothing came")


def test_a_trainer_that_is_killed_in_an_update_leaves_nobody_waiting(orphan_to_be):
    """In a process of its own; its fleet stays suspended until another one comes."""
    registration = m.Register(1, "job", 0, 0, 8, 256, 100, "lru")

    async def serve(link: CoordinatorLink, client: InferenceClient, trainer: Any) -> None:
        taken = await asyncio.to_thread(link.register, registration, 10)
        running = client.add_request([1], SamplingParams(termination_id=-1))
        number = (await asyncio.to_thread(heard, link, m.EngineRequest)).request_id
        while client.unavailable is not None:
            await asyncio.sleep(0.01)
        trainer.start()
        told: list[m.FromCoordinator] = []
        while m.Control(Signal.SUSPEND) not in told:
            told += map(wire.decode_from_coordinator, link.drain())
            await asyncio.sleep(0.01)
        waiting = client.add_request([2], SamplingParams(termination_id=-1))
        await asyncio.to_thread(heard, link, m.EngineRequest)
        trainer.kill()
        for future in (running, waiting):
            with pytest.raises(RequestFailed) as failed:
                await asyncio.wait_for(future, 50)
            assert (failed.value.code, failed.value.retryable) == ("fleet_paused", True)
        with pytest.raises(RequestFailed, match="the client that suspended it has been gone"):
            await asyncio.wait_for(client.add_request([3], SamplingParams(termination_id=-1)), 10)
        while client.unavailable is None:
            await asyncio.sleep(0.01)
        assert "has a suspended fleet" in client.unavailable
        await asyncio.to_thread(heard, link, m.RegisterAgain)
        link.send(replace(registration, generation=taken.generation, requests=[number, number + 1]))
        again = await asyncio.to_thread(heard, link, m.RegisterAck)
        assert (again.state, again.kept) == ("suspended", [])
        client.resume_engines()
        client.unpause_engines()
        answered = client.add_request([4], SamplingParams(termination_id=-1))
        new = (await asyncio.to_thread(heard, link, m.EngineRequest)).request_id
        assert new not in (number, number + 1)
        body = wire.pack({"generated_tokens": [7], "generated_text": "7"})
        link.send(m.EngineReply((m.Answer(number, "COMPLETED", 0, 0, body),)))  # late: dropped
        link.send(m.EngineReply((m.Answer(new, "COMPLETED", 0, 0, body),)))
        assert (await asyncio.wait_for(answered, 10))["generated_tokens"] == [7]

    async def main(address: str) -> None:
        client = InferenceClient(address, connect_timeout=10)
        client.start(asyncio.get_running_loop())
        context = zmq.Context()
        trainer = warm_up().Process(target=_suspend_and_hang, args=(address,))
        link = CoordinatorLink(context, address, b"engine", grace=60.0)
        try:
            await asyncio.wait_for(serve(link, client, trainer), 150)
        finally:
            if trainer.pid is not None:
                trainer.kill()
            client.stop()
            context.destroy(linger=0)

    soon = CoordinatorSettings(fleet=FleetSettings(pause_wait=1))
    with started(coordinator=soon) as coordinator:
        asyncio.run(main(coordinator.address))


def test_a_standstill_costs_no_request_and_none_is_computed_twice(orphan_to_be):
    """The engine has connected anew meanwhile, and comes back with what it has."""
    registration = m.Register(1, "job", 0, 0, 8, 256, 100, "lru")
    context = zmq.Context()
    try:
        with (
            started() as coordinator,
            talking(coordinator, b"client", sockets.CLIENT_PULSE) as client,
        ):
            link = CoordinatorLink(context, coordinator.address, b"engine", grace=60.0)
            taken = link.register(registration, 10)
            connect(client)
            client.say(m.SubmitRequest(7, -1, b"", b""))
            number = heard(link, m.EngineRequest).request_id
            for _ in range(2):
                os.kill(coordinator.process.pid, signal.SIGSTOP)
                try:
                    deadline = time.monotonic() + 10
                    while not link.check():
                        assert time.monotonic() < deadline
                        time.sleep(0.01)
                finally:
                    os.kill(coordinator.process.pid, signal.SIGCONT)
                again = replace(registration, generation=taken.generation, requests=[number])
                link.send(again)
                assert heard(link, m.RegisterAck).kept == [number]
            link.send(m.EngineReply((m.Answer(number, "COMPLETED", 0, 0, b"body"),)))
            assert client.hear(m.Reply | m.RequestError) == m.Reply(7, b"body")
    finally:
        context.destroy(linger=0)


def test_it_leaves_its_decisions_in_files(orphan_to_be, tmp_path):
    path, record = tmp_path / "schedule.json", tmp_path / "record.jsonl"
    settings = CoordinatorSettings(expected_ranks=1, block_size_tokens=BLOCK)
    prompt = list(range(10))
    files = {"schedule_path": str(path), "recording": RecordSettings(str(record))}
    with started(coordinator=settings, **files) as coordinator:
        with talking(coordinator, b"engine") as engine, talking(coordinator, b"client") as client:
            engine.say(m.Register(1, "job", 0, 0, 8, BLOCK, 100, "lru"))
            engine.hear(m.RegisterAck)
            connect(client)
            hashes = pack_hashes(block_hashes(prompt, BLOCK))
            for number, (skipped, packed) in enumerate([(0, hashes), (6, hashes), (0, None)]):
                tokens = -1 if packed is None else len(prompt)
                client.say(m.SubmitRequest(number, tokens, b"", b"", packed))
                request = engine.hear(m.EngineRequest)
                answer = m.Answer(request.request_id, "COMPLETED", skipped, 0, b"body")
                engine.say(m.EngineReply((answer,)))
                assert client.hear(m.Reply) == m.Reply(number, b"body")
        deadline = time.monotonic() + 60
        while json.loads(path.read_text())["num_requests"] < 3:  # it is written as it goes
            assert time.monotonic() < deadline
            time.sleep(0.05)
        coordinator.stop()
        assert coordinator.process.exitcode == 0
    schedule = json.loads(path.read_text())
    released = ("policy", "data_parallel_size", "num_requests")
    assert [schedule[key] for key in released] == ["longest_prefix", 1, 3]
    assert schedule["cost_policy"] == "relative_load_weighted"
    assert schedule["weight_epoch"] == 0
    assert list(schedule["accuracy"]) == ["0"]
    keys = ("request_id", "rank_index", "num_hashes")
    assert [[r[key] for key in keys] for r in schedule["records"]] == [
        [0, 0, 2],
        [1, 0, 2],
        [2, 0, 0],
    ]
    keys = ("prompt_tokens", "predicted_tokens", "cached_tokens")
    assert [[r[key] for key in keys] for r in schedule["records"]] == [
        [10, 0, 0],
        [10, 8, 6],
        [-1, 0, 0],
    ]
    opened, *requests = map(json.loads, record.read_text().splitlines())
    assert (opened["event"], opened["block_size"]) == ("open", BLOCK)
    assert [(r["hashes"], r["cached_tokens"], r["rank"]) for r in requests] == [
        (hashes.hex(), 0, 0),
        (hashes.hex(), 6, 0),
        (None, 0, 0),
    ]


def test_the_log_says_at_the_start_where_the_record_is():
    start, address = coordinator_process._start, "tcp://127.0.0.1:5"
    said = start(ProcessSettings(), address, 1024)
    assert said["address"] == address
    assert "record" not in said
    recorded = start(ProcessSettings(recording=RecordSettings("a.jsonl")), address, 1024)
    assert recorded == said | {"record": "a.jsonl"}


def test_a_record_that_cannot_be_written_is_an_error_at_the_start(tmp_path):
    nowhere = str(tmp_path / "no_such_folder" / "record.jsonl")
    with pytest.raises(CoordinatorDied, match=f"FileNotFoundError: .*{nowhere}"):
        CoordinatorProcess(ProcessSettings(recording=RecordSettings(nowhere)))


def test_no_text_in_its_log_looks_like_a_line_of_its_own(orphan_to_be, tmp_path):
    file = tmp_path / "stderr"
    process = warm_up().Process(target=_log_what_a_client_made_up, args=(str(file),))
    process.start()
    process.join(50)
    assert process.exitcode == 1
    listening, bad, failed, *trace = file.read_text().splitlines()
    assert " coordinator INFO listening " in listening
    assert bad.endswith(r" coordinator ERROR bad\n\x1b[31mred")
    assert failed.endswith(" coordinator CRITICAL coordinator_failed")
    assert all(line.startswith("  ") for line in trace)
    assert trace[-1] == "  2030-01-01 coordinator INFO stopped"


def test_it_ends_with_its_parent(orphan_to_be):
    parent, coordinator = orphan_to_be()
    assert coordinator.is_running()
    parent.kill()
    deadline = time.monotonic() + 5
    while not ended(coordinator):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ended(process: psutil.Process) -> bool:
    """Whether it has; its fork server, which ends too, may take seconds to collect it."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("gpus", [None, "0,1"])
def test_what_is_forked_sees_no_gpu_from_its_first_import_on(gpus, monkeypatch):
    """Transformer Engine asks the device on import, which takes memory of it."""
    fresh = forkserver.ForkServer()
    monkeypatch.setattr(forkserver, "ensure_running", fresh.ensure_running)
    monkeypatch.setattr(multiprocessing.get_context("forkserver"), "set_forkserver_preload", list)
    if gpus is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "all")
    warm_up()
    try:
        process = psutil.Process(fresh._forkserver_pid)
        while "multiprocessing.forkserver" not in " ".join(process.cmdline()):
            time.sleep(0.01)  # it is a fork of this process still
        seen = process.environ()
        assert seen["CUDA_VISIBLE_DEVICES"] == ""
        assert seen["NVIDIA_VISIBLE_DEVICES"] == "all"
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == gpus
    finally:
        fresh._stop()


def test_the_fork_server_is_one_for_all(shared):
    assert warm_up() is multiprocessing.get_context("forkserver")
    fork_server = psutil.Process(shared.process.pid).ppid()
    with started() as other:
        assert psutil.Process(other.process.pid).ppid() == fork_server
