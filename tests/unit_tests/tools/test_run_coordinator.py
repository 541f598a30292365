"""The coordinator alone: its flags, and a real one, which needs nothing of torch."""

import asyncio
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

import pytest
from megatron.core.inference.config import PrefixCachingEvictionPolicy

from megatron.core.inference import config
from megatron.core.inference.coordinator.policies import PrefixCachingCostPolicy
from megatron.core.inference.coordinator.runtime import keys
from megatron.core.inference.coordinator.runtime.client import InferenceClient
from megatron.core.inference.coordinator.settings import (
    CoordinatorSettings,
    FleetSettings,
    RecordSettings,
    RoutingSettings,
    SettingsError,
)

TOOLS = Path(__file__).parents[3] / "tools"
PLAIN = "--inference-coordinator-plain"
KEY_FILE = "--inference-coordinator-key-file"
CACHING = "--inference-dynamic-batching-prefix-caching"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def light_import() -> ModuleType:
    return load("light_import")


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    sys.path.insert(0, str(TOOLS))
    yield load("run_coordinator")
    sys.path.remove(str(TOOLS))


@pytest.fixture(autouse=True)
def _no_key_file(monkeypatch) -> None:
    monkeypatch.delenv(keys.KEY_FILE_VARIABLE, raising=False)


def test_no_gpu_is_seen_by_its_first_import(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    seen: list[str] = []
    stub = ModuleType("light_import")
    stub.import_lightly = lambda: seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
    monkeypatch.setitem(sys.modules, "light_import", stub)
    load("run_coordinator")
    assert seen == [""]


# --- flags ---------------------------------------------------------------------------------------


def settings(tool: ModuleType, *flags: str):
    return tool.settings_of(tool.make_parser().parse_args(list(flags)))


def test_defaults(tool):
    made = settings(tool, PLAIN)
    assert (made.host, made.port, made.lock) == ("127.0.0.1", 5100, None)
    assert (made.schedule_path, made.recording) == (None, RecordSettings())
    assert made.coordinator == CoordinatorSettings()


def test_every_flag_is_read(tool, tmp_path):
    made = settings(
        tool,
        *(PLAIN, "--host=10.1.1.1", "--port=0", "--expected-replicas=3", "--deterministic-mode"),
        *(f"--coordinator-schedule-output={tmp_path / 'decisions.json'}",),
        f"--inference-coordinator-record={tmp_path / 'record.jsonl'}",
        "--inference-coordinator-record-max-bytes=2000000",
        *("--inference-dynamic-batching-block-size=64", f"{CACHING}-eviction-policy=lru"),
        *("--inference-dynamic-batching-max-requests=8", f"{CACHING}-cost-policy=prefill_work"),
        *(f"{CACHING}-load-beta=0.5", "--inference-coordinator-max-retries=3"),
    )
    assert (made.host, made.port) == ("10.1.1.1", 0)
    assert made.schedule_path == str(tmp_path / "decisions.json")
    assert made.recording == RecordSettings(str(tmp_path / "record.jsonl"), 2_000_000)
    assert made.coordinator == CoordinatorSettings(
        routing=RoutingSettings(cost_policy=PrefixCachingCostPolicy.PREFILL_WORK, load_beta=0.5),
        fleet=FleetSettings(max_retries=3),
        expected_ranks=3,
        block_size_tokens=64,
        max_requests=8,
        eviction=PrefixCachingEvictionPolicy.LRU,
        deterministic=True,
    )


def test_without_prefix_caching_there_is_no_block_size(tool):
    core = settings(tool, PLAIN, f"--no-{CACHING[2:]}").coordinator
    assert (core.prefix_caching, core.block_size_tokens, core.hashed) == (False, None, False)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--port=65536"], "--port is 65536; give a port from 0 to 65535"),
        (
            ["--address-file=/no/such/folder/a"],
            "--address-file /no/such/folder/a: there is no folder /no/such/folder",
        ),
        (
            ["--coordinator-schedule-output=/dev/null"],
            "--coordinator-schedule-output /dev/null: is a link or a device; name a plain file",
        ),
        (
            ["--inference-coordinator-record-max-bytes=0"],
            "--inference-coordinator-record-max-bytes is 0; give a whole number 1048576 or more",
        ),
        (["--expected-replicas=-1"], "expected_ranks is -1; it must be 0 or more"),
        (
            ["--inference-dynamic-batching-block-size=0"],
            "prefix caching needs block_size_tokens of 1 or more",
        ),
        (
            ["--inference-coordinator-max-retries=-1"],
            "--inference-coordinator-max-retries is -1; give a whole number 0 or more",
        ),
    ],
)
def test_a_value_out_of_range_is_one_sentence(tool, flags, sentence):
    with pytest.raises(SettingsError) as error:
        settings(tool, PLAIN, *flags)
    assert str(error.value) == sentence


def test_keys_are_asked_for_unless_everybody_may_talk(tool, tmp_path, monkeypatch):
    with pytest.raises(SettingsError, match=f"{KEY_FILE}.*{PLAIN}"):
        settings(tool)
    path = tmp_path / "keys.json"
    assert settings(tool, f"{KEY_FILE}={path}").lock.ring == keys.KeyRing.read(path)
    monkeypatch.setenv(keys.KEY_FILE_VARIABLE, str(tmp_path / "others.json"))
    assert settings(tool).lock.ring == keys.KeyRing.read(tmp_path / "others.json")


def test_how_to_join_is_told(tool, tmp_path, capsys):
    args = tool.make_parser().parse_args(
        [f"{KEY_FILE}={tmp_path / 'keys.json'}", f"--address-file={tmp_path / 'address'}"]
    )
    tool.announce(args, CoordinatorSettings(block_size_tokens=64), "tcp://10.1.1.1:5100")
    assert capsys.readouterr().out.splitlines() == [
        "[coordinator] listening at tcp://10.1.1.1:5100: longest_prefix, weighed by "
        "relative_load_weighted",
        "[coordinator] a replica joins with:",
        "  torchrun --nproc-per-node 1 tools/run_dynamic_text_generation_server.py \\",
        "      --inference-coordinator-address tcp://10.1.1.1:5100 \\",
        f"      --inference-coordinator-key-file {tmp_path / 'keys.json'} \\",
        "      --inference-dynamic-batching-block-size 64",
    ]
    assert (tmp_path / "address").read_text() == "tcp://10.1.1.1:5100\n"
    assert [path.name for path in tmp_path.iterdir()] == ["address"]


def test_the_address_goes_into_no_file_of_anybody_else(tool, tmp_path, monkeypatch):
    others = tmp_path / "others"
    others.write_text("precious")
    for name in ("address", "address.partial"):
        (tmp_path / name).symlink_to(others)
    (tmp_path / "a.partial").write_text("a neighbor")
    for name in ("address", "a.json"):
        args = tool.make_parser().parse_args([PLAIN, f"--address-file={tmp_path / name}"])
        tool.announce(args, CoordinatorSettings(), "tcp://127.0.0.1:5100")
        assert not (tmp_path / name).is_symlink()
        assert (tmp_path / name).stat().st_mode & 0o133 == 0
    assert (others.read_text(), (tmp_path / "a.partial").read_text()) == ("precious", "a neighbor")


def test_on_all_interfaces_one_that_others_reach_is_told(tool, monkeypatch, capsys):
    monkeypatch.setattr(tool.addresses, "other_addresses", lambda: ["10.2.2.2"])
    args = tool.make_parser().parse_args([PLAIN])
    core = CoordinatorSettings(prefix_caching=False, block_size_tokens=None)
    tool.announce(args, core, "tcp://0.0.0.0:5100")
    out = capsys.readouterr().out
    assert "listening at tcp://10.2.2.2:5100: load_balanced\n" in out
    assert f"{PLAIN} \\\n      --no-inference-dynamic-batching-prefix-caching\n" in out


# --- a real one ----------------------------------------------------------------------------------


@contextmanager
def running(folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """A coordinator, and its address."""
    command = [sys.executable, TOOLS / "run_coordinator.py", "--port=0", "--address-file=address"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, *flags], stdout=log, stderr=log, cwd=folder)
    try:
        deadline = time.monotonic() + 60
        while not (folder / "address").exists():
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield process, (folder / "address").read_text().strip()
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_takes_clients_and_ends_in_order(tmp_path, number):
    async def connect(address: str) -> None:
        keys.remember(address, keys.KeyRing.read(tmp_path / "keys.json"))
        client = InferenceClient(address, connect_timeout=30)
        client.start(asyncio.get_running_loop())
        client.stop()

    flags = [f"{KEY_FILE}=keys.json", "--coordinator-schedule-output=decisions.json"]
    with running(tmp_path, *flags) as (process, address):
        asyncio.run(connect(address))
        process.send_signal(number)
        assert process.wait(timeout=20) == 0
    log = (tmp_path / "log").read_text()
    assert "coordinator INFO stopped client_lost=1" in log
    assert log.endswith("[coordinator] stopped\n")
    assert json.loads((tmp_path / "decisions.json").read_text())["num_requests"] == 0


def test_it_imports_nothing_of_torch_and_takes_little_memory(tmp_path):
    with running(tmp_path, PLAIN) as (process, _):
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        status = Path(f"/proc/{process.pid}/status").read_text()
    assert "libtorch" not in maps
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
    assert int(line.split()[1]) < 100_000  # KB; with torch it is 600,000


def test_what_a_user_can_mend_is_one_sentence(tmp_path):
    command = [sys.executable, TOOLS / "run_coordinator.py"]
    open_to_all = tmp_path / "keys.json"
    keys.Lock.kept(open_to_all)
    open_to_all.chmod(0o644)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for flags, sentence in (
            ([PLAIN, f"--port={port}"], f"port {port} on 127.0.0.1 is in use; name another"),
            ([], f"name a file for the keys with {KEY_FILE}"),
            ([f"{KEY_FILE}={open_to_all}"], f"key file {open_to_all}: has mode 644; run: chmod"),
        ):
            ended = subprocess.run(
                [*command, *flags], capture_output=True, text=True, timeout=60, check=False
            )
            assert ended.returncode == 1
            assert f"[coordinator] error: {sentence}" in ended.stderr
            assert "Traceback" not in ended.stderr


def test_help_teaches(tool, capsys):
    with pytest.raises(SystemExit):
        tool.main(["--help"])
    out = capsys.readouterr().out
    assert "tools/run_coordinator.py --host 10.0.0.1" in out
    for settings_class in (RoutingSettings, FleetSettings):
        for name in settings_class.options():
            assert settings_class.flag(name) in out


# --- imports -------------------------------------------------------------------------------------


def test_where_megatron_core_is_imported_already_nothing_is_changed(light_import):
    before = sys.modules["megatron.core"]
    assert light_import.import_lightly() is False
    assert sys.modules["megatron.core"] is before


def test_the_enums_are_megatron_core_s(light_import):
    spec = PathFinder.find_spec(config.__name__, [str(Path(config.__file__).parent)])
    found = vars(light_import._enums_of(spec))
    names = [name for name, value in vars(config).items() if _is_enum_of(value, config.__name__)]
    assert {"PrefixCachingCoordinatorPolicy", "PrefixCachingEvictionPolicy"} <= set(names)
    for name in names:
        theirs = getattr(config, name)
        assert {m.name: m.value for m in found[name]} == {m.name: m.value for m in theirs}
        assert issubclass(found[name], str) is issubclass(theirs, str)


def _is_enum_of(value: object, module: str) -> bool:
    return isinstance(value, type) and issubclass(value, Enum) and value.__module__ == module


def test_where_there_is_no_megatron_core_imports_are_left_alone():
    """As with an editable install of another layout: then they are slow, and right."""
    found = "light_import.import_lightly(), 'megatron.core' in sys.modules"
    script = f"import light_import, sys; print({found})"
    ended = subprocess.run(
        [sys.executable, "-S", "-c", script],
        env={**os.environ, "PYTHONPATH": str(TOOLS)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd="/",
    )
    assert ended.stdout == "False False\n"
