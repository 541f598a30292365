"""The serving tool and its launcher with everything heavy made up: no model, no process, no port.

The flags go through Megatron's real parser. Real servers are in tests/end_to_end.
"""

import argparse
import asyncio
import importlib.util
import io
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from megatron.training.argument_utils import inference_cfg_from_args

from megatron.core.inference import coordinator
from megatron.core.inference.coordinator.arguments import routing_settings_from_args
from megatron.core.inference.coordinator.runtime import (
    fork_server,
    http,
    model,
    serving,
    stop_signal,
)
from megatron.core.inference.coordinator.runtime.http import access
from megatron.core.inference.coordinator.runtime.http.front_ends import FrontEndError
from megatron.core.inference.coordinator.runtime.http.limits import HttpSettings
from megatron.core.inference.coordinator.settings import SettingsError
from megatron.training.arguments import add_megatron_arguments

TOOLS = Path(__file__).parents[3] / "tools"
COORDINATOR = "tcp://127.0.0.1:7777"
CURL = (
    "  curl http://127.0.0.1:5000/v1/completions -H 'Content-Type: application/json' "
    '-d \'{"model": "megatron", "prompt": "Hello", "max_tokens": 16}\''
)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tool_{name}", TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for it there
    spec.loader.exec_module(module)
    return module


tool = load("run_dynamic_text_generation_server")
sys.path.insert(0, str(TOOLS))
serve = load("serve")
launch = sys.modules["launch"]


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    return tool.add_server_args(parser)


@pytest.fixture
def parsed(parser) -> Callable[..., argparse.Namespace]:
    """`parsed(*flags, dp=…)`: arguments as they are once Megatron has validated them."""

    def parse(*flags: str, dp: int = 2) -> argparse.Namespace:
        args = parser.parse_args(list(flags))
        args.data_parallel_size = dp
        args.inference_dynamic_batching_enable_prefix_caching = True
        return args

    return parse


# --- flags ---------------------------------------------------------------------------------------


def test_defaults(parsed):
    args = parsed()
    assert (args.device, args.host, args.port) == ("auto", "127.0.0.1", 5000)
    assert (args.frontend_replicas, args.frontend_on_all_ranks) == (-1, False)
    assert (args.url_file, args.parsers, args.model_name) == (None, [], "megatron")
    assert args.inference_coordinator_port is None
    assert args.coordinator_schedule_output is None
    assert routing_settings_from_args(args).coordinator_policy == "longest_prefix"


def test_every_flag_is_read(parsed):
    args = parsed(
        *("--device", "cpu", "--host", "0.0.0.0", "--port", "0", "--frontend-replicas", "3"),
        *("--frontend-on-all-ranks", "--url-file", "a/urls.json", "--parsers", "json", "tool_use"),
        *("--model-name", "mine", "--coordinator-schedule-output", "decisions.json"),
        *("--inference-coordinator-port", "6000", "--inference-coordinator-host", "10.1.1.1"),
    )
    assert (args.device, args.host, args.port) == ("cpu", "0.0.0.0", 0)
    assert (args.frontend_replicas, args.frontend_on_all_ranks) == (3, True)
    assert (args.url_file, args.parsers) == (Path("a/urls.json"), ["json", "tool_use"])
    assert (args.model_name, args.coordinator_schedule_output) == ("mine", "decisions.json")
    assert (args.inference_coordinator_port, args.inference_coordinator_host) == (6000, "10.1.1.1")


def test_flags_of_megatron_lm_s_own_tools_are_taken(parsed):
    flags = ["--return-log-probs", "--skip-prompt-log-probs", "--use-flashinfer-fused-rope"]
    flags += ["--inference-ckpt-non-strict", "--verbose"]
    flags += ["--coordinator-host", "10.1.1.1", "--coordinator-port", "6000"]
    args, untouched = parsed(*flags), parsed()
    assert (args.inference_coordinator_host, args.inference_coordinator_port) == ("10.1.1.1", 6000)
    assert untouched.inference_coordinator_port is None
    assert (args.inference_text_gen_server_logging, args.skip_prompt_log_probs) == (True, True)
    assert not untouched.inference_text_gen_server_logging
    for flags, only_last in (
        ([], True),
        (["--return-log-probs"], False),
        (["--return-log-probs", "--skip-prompt-log-probs"], True),
    ):
        config = inference_cfg_from_args(parsed(*flags))
        assert (not config.return_log_probs or config.skip_prompt_log_probs) is only_last
    assert inference_cfg_from_args(args).use_flashinfer_fused_rope


def test_http_limits_are_read_and_have_defaults(parsed):
    assert HttpSettings.from_mapping(vars(parsed())) == HttpSettings()
    flags = ["--http-max-body-mib=1", "--http-max-header-kib=2", "--http-header-timeout=3"]
    flags += ["--http-body-timeout=4.5", "--http-idle-timeout=6"]
    flags += ["--http-body-budget-mib=7", "--http-max-request-tokens=8"]
    found = HttpSettings.from_mapping(vars(parsed(*flags)))
    assert found == HttpSettings(1, 2, 3.0, 4.5, 6.0, 7, 8)


@pytest.mark.parametrize(
    ("settings", "context", "largest", "budget"),
    [
        (HttpSettings(), None, 8, 128),
        (HttpSettings(), 8192, 5, 128),
        (HttpSettings(), 131072, 8, 128),
        (HttpSettings(), 131073, 9, 128),
        (HttpSettings(), 2**22, 132, 132),
        (HttpSettings(max_body_mib=64, body_budget_mib=1), 8192, 64, 64),
    ],
)
def test_the_largest_body_fits_the_context_and_the_budget(settings, context, largest, budget):
    assert settings.largest_body(context) == largest * 2**20
    assert settings.body_budget(context) == budget * 2**20


def test_keys_are_digests_before_anybody_sees_the_arguments(parsed, tmp_path):
    file = tmp_path / "keys"
    file.write_text("other\n")
    args = parsed("--api-key", "sesame", "--api-key=a,b", "--api-key-file", str(file))
    assert access.keys_from_args(args) == access.ApiKeys(["sesame", "a", "b", "other"])
    assert "sesame" not in str(vars(args))


def test_a_device_that_is_none_is_refused(parsed, capsys):
    with pytest.raises(SystemExit):
        parsed("--device", "tpu")
    assert "argument --device: invalid choice: 'tpu'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ["--frontend-replicas", "0"],
            "--frontend-replicas is 0; give 1 or more, or -1 for the default",
        ),
        (
            ["--frontend-replicas", "-2"],
            "--frontend-replicas is -2; give 1 or more, or -1 for the default",
        ),
        (["--port", "65536"], "--port is 65536; give a port from 0 to 65535"),
        (["--port", "-1"], "--port is -1; give a port from 0 to 65535"),
        (
            ["--inference-coordinator-port", "70000"],
            "--inference-coordinator-port is 70000; give a port from 0 to 65535",
        ),
        (
            ["--parsers", "qwen3-coder-tool", "json"],
            "--parsers json: megatron-core has deepseek-r1-reasoning, nemotron-v3-reasoning, "
            "qwen3-coder-tool",
        ),
        (
            ["--http-max-body-mib", "-1"],
            "--http-max-body-mib is -1; give a whole number 0 or more",
        ),
        (
            ["--http-header-timeout", "0"],
            "--http-header-timeout is 0.0; give a number 0.1 or more",
        ),
        (
            ["--api-key-file", "/no/such/file"],
            "--api-key-file /no/such/file cannot be read: No such file or directory",
        ),
        (
            ["--url-file", "/no/such/folder/urls.json"],
            "--url-file /no/such/folder/urls.json: there is no folder /no/such/folder",
        ),
        (["--model-name", ""], "--model-name is empty; give the name that answers shall show"),
        (
            ["--inference-dynamic-batching-block-size", "0"],
            "--inference-dynamic-batching-block-size is 0; give 1 or more",
        ),
        (
            ["--inference-coordinator-record", "/no/such/folder/r.jsonl"],
            "--inference-coordinator-record /no/such/folder/r.jsonl: there is no folder "
            "/no/such/folder",
        ),
    ],
)
def test_a_value_out_of_range_stops_the_start_with_one_sentence(parsed, flags, sentence):
    with pytest.raises(SettingsError) as error:
        tool._check(parsed(*flags), rank=0)
    assert str(error.value) == sentence


@pytest.mark.parametrize("flags", [[], ["--port", "0"], ["--port", "65535"]])
def test_what_is_in_range_is_taken(parsed, flags):
    tool._check(parsed(*flags), rank=0)


def test_the_addresses_of_an_earlier_run_are_removed_before_anything_starts(parsed, tmp_path):
    url_file = tmp_path / "urls.json"
    url_file.write_text("old")
    tool._check(parsed("--url-file", str(url_file)), rank=1)
    assert url_file.exists()  # the first rank's business
    tool._check(parsed("--url-file", str(url_file)), rank=0)
    assert not url_file.exists()


def test_other_machines_need_no_folder_for_the_url_file(parsed):
    tool._check(parsed("--url-file", "/no/such/folder/urls.json"), rank=8)


def test_a_key_variable_that_came_out_empty_stops_the_start(parsed, monkeypatch):
    monkeypatch.setenv("MEGATRON_API_KEY", "")
    with pytest.raises(SettingsError, match=r"^MEGATRON_API_KEY holds no key"):
        tool._check(parsed(), rank=0)
    tool._check(parsed(), rank=1)  # has no front ends, and may have another environment


# --- keys on the command line --------------------------------------------------------------------


def test_the_tool_calls_flag_and_variable_as_they_are():
    assert (tool._KEY_FLAG, tool._KEY_VARIABLE) == (access.FLAG, access.VARIABLE)


@pytest.mark.parametrize(
    ("argv", "rest", "keys"),
    [
        (["--port", "0", "--api-key", "k", "--load", "x"], ["--port", "0", "--load", "x"], "k"),
        (["--api-key=a,b", "--api-key", "c", "--api-key=-d"], [], "a,b,c,-d"),
        (["--api-key-file", "f", "--api-key", "k"], ["--api-key-file", "f"], "k"),
    ],
)
@pytest.mark.parametrize("known", [None, "old"])
def test_keys_leave_the_command_line_at_once(monkeypatch, argv, rest, keys, known):
    executed = []
    monkeypatch.setattr(os, "execv", lambda *call: executed.append(call))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-u", "tool.py", *argv])
    monkeypatch.setenv("MEGATRON_API_KEY", known or "")
    tool._hide_keys(argv)
    assert executed == [(sys.executable, ["python", "-u", "tool.py", *rest])]
    assert os.environ["MEGATRON_API_KEY"] == (f"{known},{keys}" if known else keys)


@pytest.mark.parametrize(
    "argv", [[], ["--port", "0"], ["--api-key"], ["--api-key="], ["--api-key", "--port"]]
)
def test_without_a_key_nothing_is_done_and_mistakes_are_left_to_the_parser(monkeypatch, argv):
    monkeypatch.delenv("MEGATRON_API_KEY", raising=False)
    monkeypatch.setattr(os, "execv", None)
    tool._hide_keys(argv)
    assert "MEGATRON_API_KEY" not in os.environ


def test_a_process_list_shows_no_key(tmp_path):
    """The real tool, in its first moments."""
    tool = [sys.executable, str(TOOLS / "run_dynamic_text_generation_server.py")]
    process = subprocess.Popen(
        [*tool, "--api-key", "sesame", "--device", "cpu"], cwd=tmp_path, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 20
        while psutil.Process(process.pid).cmdline() != [*tool, "--device", "cpu"]:
            assert process.poll() is None
            assert time.monotonic() < deadline
        assert psutil.Process(process.pid).environ()["MEGATRON_API_KEY"] == "sesame"
    finally:
        process.kill()
        process.wait()


# --- help and mistakes ---------------------------------------------------------------------------


@pytest.fixture
def says(capsys) -> Callable[..., tuple[Any, str, str]]:
    """`says(*flags)`: exit code, output and errors of the tool's real parser."""

    def run(*flags: str) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as stopped:
            model.parse(tool.add_server_args, flags)
        return stopped.value.code, *capsys.readouterr()

    return run


def test_help_is_ours_and_all_of_it_is_asked_for(says):
    code, out, err = says("--help")
    assert (code, err) == (0, "")
    for flag in ("--host", "--api-key", "prefix-caching-coordinator-policy", "--help-all"):
        assert flag in out
    assert "--rampup-batch-size" not in out
    code, everything, err = says("--help-all")
    assert (code, err) == (0, "")
    assert "--rampup-batch-size" in everything
    assert "--api-key" in everything
    assert len(everything) > 5 * len(out)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--frontend-replica", "2"], "there is no flag --frontend-replica; did you mean "),
        (["--qqqqqqqqqqqqqq=1"], "there is no flag --qqqqqqqqqqqqqq; --help shows those there are"),
        (["stray"], "unrecognized arguments: stray; --help shows those there are"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["--api-key", ""], "argument --api-key: "),
        (["--port", "many"], "argument --port: invalid int value: 'many'"),
    ],
)
def test_a_mistake_is_one_sentence(says, flags, sentence):
    code, out, err = says(*flags)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {sentence}")
    assert err.count("\n") == 1
    assert "--frontend-replicas?" in err or "did you mean" not in sentence


# --- the device ----------------------------------------------------------------------------------


def test_a_gpu_that_is_not_there_is_one_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        tool._choose_device(["--num-layers", "4", "--device=cuda"])
    assert stopped.value.code == "--device cuda, but torch finds no GPU; use --device cpu"


def test_a_gpu_that_is_there_is_taken(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    tool._choose_device(["--device", "cuda"])


@pytest.mark.parametrize(("device", "visible"), [("cpu", ""), ("auto", "0,1"), (None, "0,1")])
def test_the_cpu_hides_the_gpus_before_torch_looks(monkeypatch, device, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    tool._choose_device(["--load", "x"] + (["--device", device] if device else []))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible


# --- building ------------------------------------------------------------------------------------


@pytest.fixture
def built(monkeypatch, parser) -> Callable[..., SimpleNamespace]:
    """`built(*flags, rank=…, gpu=…)`: what `_build` did, its model and process groups made up."""
    did = SimpleNamespace(argv=None, defaults=None, patched=[], warmed=0, loaded=[], setup=None)

    def parse(provider: Callable, argv: list[str], defaults: dict[str, Any]) -> argparse.Namespace:
        assert provider is tool.add_server_args
        print("Megatron tells of many things")
        did.argv, did.defaults = argv, defaults
        # The type of the built-in model's tokenizer is a choice that the real `parse` adds.
        head = len(model.BUILT_IN_MODEL)
        built_in = tuple(argv[:head]) == model.BUILT_IN_MODEL
        return parser.parse_args(argv[head:] if built_in else argv)

    def warm_up() -> None:
        did.warmed += 1

    def load_checkpoint(model_: Any, args: argparse.Namespace) -> str:
        did.loaded.append(args.load)
        return args.load

    monkeypatch.setattr(model, "parse", parse)
    monkeypatch.setattr(model, "initialize", lambda args: None)
    monkeypatch.setattr(model, "build_model", lambda args: "model")
    monkeypatch.setattr(model, "load_checkpoint", load_checkpoint)
    monkeypatch.setattr(model, "find_checkpoint", lambda path, step: path)
    monkeypatch.setattr(model, "build_inference_config", lambda args, model_: "config")
    monkeypatch.setattr(model, "build_tokenizer", lambda args: "tokenizer")
    monkeypatch.setattr(model, "build_engine", lambda *parts: parts)
    monkeypatch.setattr(coordinator, "patch", did.patched.append)
    monkeypatch.setattr(fork_server, "warm_up", warm_up)

    def build(*flags: str, rank: int = 0, gpu: bool = False) -> SimpleNamespace:
        monkeypatch.setattr(model, "device_type", lambda: "cuda" if gpu else "cpu")
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
        did.setup = tool._build(list(flags), rank)
        return did

    return build


def test_without_a_model_the_built_in_one_is_served(built, capsys):
    did = built("--port", "0")
    assert did.argv == [*model.BUILT_IN_MODEL, "--port", "0"]
    assert did.setup.engine == ("model", "tokenizer", "config")
    assert did.loaded == []
    assert capsys.readouterr().out == "[server] building the built-in GPT (random weights)\n"


@pytest.mark.parametrize("flag", [["--num-layers", "2"], ["--num-layers=2"]])
def test_a_model_that_is_described_is_served(built, flag, capsys):
    did = built(*flag, "--hidden-size", "64")
    assert did.argv == [*flag, "--hidden-size", "64"]
    assert did.loaded == []
    assert capsys.readouterr().out == "[server] building the model\n"


@pytest.mark.parametrize("flag", [["--load", "folder"], ["--load=folder"]])
def test_a_checkpoint_is_loaded(built, flag, capsys):
    did = built(*flag)
    assert did.argv == flag
    assert did.loaded == ["folder"]
    assert capsys.readouterr().out == "[server] building the model\n[server] loaded folder\n"


def test_prefix_caching_is_on_and_retains_and_blocks_are_small_on_a_cpu(built):
    prefix = "inference_dynamic_batching_"
    caching = {
        f"{prefix}enable_prefix_caching": True,
        f"{prefix}prefix_caching_eviction_policy": "lru",
    }
    assert built("--load=folder", "--bf16", gpu=True).defaults == caching
    # Of the smallest model Megatron would run more requests than tokens, in a type that flash-attn
    # does not compute in.
    small = {"bf16": True, f"{prefix}buffer_size_gb": 4.0, f"{prefix}max_requests": 256}
    assert built(gpu=True).defaults == caching | small
    assert built().defaults == caching | {f"{prefix}block_size": 64}


@pytest.mark.parametrize("flag", ["--bf16", "--fp16", None])
def test_a_checkpoint_that_is_computed_in_fp32_is_told(built, flag, capsys):
    built("--load=folder", *([flag] if flag else []), gpu=True)
    told = "note: it computes in fp32" in capsys.readouterr().out
    assert told is (flag is None)


def test_the_settings_that_the_flags_ask_for_are_patched_in(built):
    did = built("--inference-dynamic-batching-prefix-caching-load-beta", "0.5")
    (settings,) = did.patched
    assert settings.load_beta == 0.5
    assert did.setup.settings is settings


@pytest.mark.parametrize(
    ("rank", "flags", "warmed"), [(0, [], 1), (1, [], 0), (1, ["--frontend-on-all-ranks"], 1)]
)
def test_only_ranks_that_start_processes_warm_a_fork_server(built, rank, flags, warmed, capsys):
    assert built(*flags, rank=rank).warmed == warmed
    assert (capsys.readouterr().out == "") is (rank > 0)


@pytest.mark.parametrize(
    "flags",
    [
        ["--frontend-replicas=0"],
        ["--inference-dynamic-batching-prefix-caching-load-beta=-1"],
        [
            "--inference-dynamic-batching-prefix-caching-burst-cap=2",
            "--inference-dynamic-batching-prefix-caching-coordinator-policy=load_balanced",
        ],
    ],
)
def test_bad_settings_stop_before_anything_is_patched_or_started(built, flags):
    with pytest.raises(SettingsError):
        built(*flags)
    did = built()  # the next one, which is good, is the first that is
    assert (len(did.patched), did.warmed) == (1, 1)


def test_what_megatron_prints_is_kept_back_unless_it_fails(built, monkeypatch, capsys):
    def parse(*args: Any) -> None:
        print("usage: …")
        raise SystemExit(0)

    monkeypatch.setattr(model, "parse", parse)
    with pytest.raises(SystemExit):
        built("--help")
    assert capsys.readouterr().out == "usage: …\n"


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_of_a_machine_says_what_every_rank_finds_wrong(
    built, monkeypatch, capsys, rank
):
    def parse(*args: Any) -> None:
        print("error: there is no flag --prt", file=sys.stderr)
        raise SystemExit(2)

    def ended_meanwhile(seconds: float) -> None:
        assert seconds == tool._SAID_BY_THE_FIRST_S
        assert capsys.readouterr().err == ""
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "parse", parse)
    monkeypatch.setattr(tool.time, "sleep", ended_meanwhile)
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
        built("--prt")
    assert ended.type is (KeyboardInterrupt if rank else SystemExit)
    assert capsys.readouterr().err == ("" if rank else "error: there is no flag --prt\n")


# --- one rank's life -----------------------------------------------------------------------------


class Engine:
    """Starts, runs until it is told to end or fails, and notes when it ended."""

    def __init__(self, did: list[Any], process: Any):
        self._did, self._process = did, process
        self.controller = SimpleNamespace(tokenizer="tokenizer", vocab_size=260)
        self.context = SimpleNamespace(max_sequence_length=8192)
        self.fail = asyncio.Event()
        self.stop = asyncio.Event()
        self.started: tuple | None = None

    async def start_listening_to_data_parallel_coordinator(self, port: Any, **options: Any) -> str:
        self.started = port, options
        self._prefix_routing = SimpleNamespace(
            ending=False, process=self._process, host="10.1.1.1", queue={}
        )
        self.engine_loop_task = asyncio.create_task(self._run())
        return COORDINATOR

    async def _run(self) -> None:
        failing = asyncio.create_task(self.fail.wait())
        stopping = asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait({failing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if self.fail.is_set():
                raise RuntimeError("the coordinator died")
        finally:
            failing.cancel()
            stopping.cancel()
            self._did.append("engine ended")


class Life:
    """A rank that serves, with front ends and other ranks made up.

    Attributes:
        did: What happened, in order.
        front_ends: Arguments that front ends were started with.
        others: What other ranks contribute when addresses are gathered.
    """

    def __init__(self, args: argparse.Namespace, rank: int):
        self.did: list[Any] = []
        self.front_ends: list[tuple[tuple, dict]] = []
        self.others: list[tuple[str | None, bool]] = []
        self.front_end_failure: Exception | None = None
        self.supervision: Future[None] = Future()
        self.rank = rank
        process = SimpleNamespace(stop=lambda: self.did.append("coordinator ended"))
        starts_it = rank == 0 and args.inference_coordinator_address is None
        self.engine = Engine(self.did, process if starts_it else None)
        settings = routing_settings_from_args(args)
        self.setup = serving.Setup(args, settings, self.engine, rank)
        self.stop: Callable[[], None] | None = None
        self.limits: tuple[float, ...] = ()  # seconds to end in, and the exit code then

    def start_text_gen_server(self, *args: Any, **options: Any) -> str:
        assert threading.current_thread() is not threading.main_thread()  # the engine runs on
        self.front_ends.append((args, options))
        if self.front_end_failure is not None:
            raise self.front_end_failure
        return f"http://127.0.0.1:{args[3] or 5555}"

    def drain_text_gen_server(self, seconds: float) -> bool:
        assert threading.current_thread() is not threading.main_thread()
        self.did.append(f"front ends have {seconds:g} s")
        return True

    def stop_text_gen_server(self) -> None:
        self.did.append("front ends ended")

    def gathered(self, mine: tuple[str | None, bool]) -> list[tuple[str | None, bool]]:
        assert threading.current_thread() is not threading.main_thread()  # the engine runs on
        self.did.append("gathered")
        return [mine, *self.others] if self.rank == 0 else [*self.others, mine]

    def live(self, act: Callable[["Life"], None]) -> None:
        """Serve; `act` is called once the rank serves, in a thread as a signal would be."""

        async def run() -> None:
            server = serving.Server(self.setup)
            task = asyncio.create_task(server.serve(self._on_stop))
            while "gathered" not in self.did and not task.done():
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.01)
            if not task.done():
                await asyncio.to_thread(act, self)
            await asyncio.wait_for(task, 10)

        asyncio.run(run())

    def _on_stop(self, callback: Callable[[], None], *limits: float) -> None:
        self.stop, self.limits = callback, limits


def press_ctrl_c(life: Life) -> None:
    life.stop()


@pytest.fixture
def life(monkeypatch, parsed) -> Callable[..., Life]:
    """`life(*flags, rank=…, dp=…)`: a rank, ready to serve."""

    def make(*flags: str, rank: int = 0, dp: int = 2) -> Life:
        made = Life(parsed(*flags, dp=dp), rank)
        monkeypatch.setattr(http, "start_text_gen_server", made.start_text_gen_server)
        monkeypatch.setattr(http, "stop_text_gen_server", made.stop_text_gen_server)
        monkeypatch.setattr(http, "drain_text_gen_server", made.drain_text_gen_server)
        monkeypatch.setattr(serving, "gathered", made.gathered)
        monkeypatch.setattr(http, "supervision", lambda: made.supervision)
        return made

    return make


def test_a_rank_ends_with_the_reason_when_its_front_ends_are_given_up(life):
    rank = life()
    failure = FrontEndError("none can be kept alive")
    with pytest.raises(FrontEndError, match="none can be kept alive"):
        rank.live(lambda life: life.supervision.set_exception(failure))
    assert rank.did[-3:] == ["front ends ended", "engine ended", "coordinator ended"]


POLICY = "--inference-dynamic-batching-prefix-caching-"


def test_what_a_newcomer_reads(life, capsys):
    life().live(press_ctrl_c)
    assert capsys.readouterr().out.splitlines() == [
        "[server] waiting for the coordinator, and for 2 replicas to register",
        "[server] starting 4 HTTP front ends",
        "[server] ready: 2 replicas, longest_prefix weighed by relative_load_weighted",
        "[server] note: while load is low, sessions that share a system prompt stay on one "
        f"replica; {POLICY}cost-policy added_delay spreads them (docs/choosing-a-policy.md)",
        "[server] serving at http://127.0.0.1:5000/v1",
        "[server] try:",
        CURL,
        "[server] stopping",
    ]


@pytest.mark.parametrize("dp", [1, 8])
def test_counts_are_told_in_words_that_fit(life, dp, capsys):
    life("--frontend-replicas", "1", dp=dp).live(press_ctrl_c)
    out = capsys.readouterr().out
    replicas = {1: "1 replica", 8: "8 replicas"}[dp]
    assert f"for {replicas} to register\n" in out
    assert "starting 1 HTTP front end\n" in out
    assert f"ready: {replicas}, " in out


@pytest.mark.parametrize(
    ("flags", "policy"),
    [
        (
            [POLICY + "cost-policy", "prefill_work"],
            "longest_prefix weighed by prefill_work",
        ),
        (
            [POLICY + "coordinator-policy", "first_prefix_block"],
            "first_prefix_block weighed by relative_load_weighted",
        ),
        ([POLICY + "coordinator-policy", "load_balanced"], "load_balanced"),
    ],
)
def test_the_policy_in_force_is_told(life, flags, policy, capsys):
    life(*flags).live(press_ctrl_c)
    assert f"[server] ready: 2 replicas, {policy}\n" in capsys.readouterr().out


def test_without_prefix_caching_the_policy_in_force_is_load_balanced(life, capsys):
    rank = life()
    rank.setup.args.inference_dynamic_batching_enable_prefix_caching = False
    rank.live(press_ctrl_c)
    out = capsys.readouterr().out
    assert "[server] ready: 2 replicas, load_balanced\n" in out
    assert "note:" not in out


def test_who_chose_a_policy_gets_no_advice(life, capsys):
    life(POLICY + "cost-policy", "added_delay").live(press_ctrl_c)
    assert "note:" not in capsys.readouterr().out


def test_an_option_that_nobody_reads_is_told(life, capsys):
    life(POLICY + "routing-alpha", "0.7").live(press_ctrl_c)
    assert f"[server] note: {POLICY}routing-alpha is read by" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "dp", "expected"),
    [
        ([], 1, (5000, 4)),
        ([], 8, (5000, 8)),
        (["--port", "0"], 2, (0, 4)),
        (["--frontend-replicas", "3"], 8, (5000, 3)),
        (["--frontend-on-all-ranks"], 8, (0, 4)),
        (["--frontend-on-all-ranks", "--frontend-replicas", "2", "--port", "80"], 8, (0, 2)),
    ],
)
def test_how_many_front_ends_are_started_and_where(life, flags, dp, expected):
    rank = life(*flags, dp=dp)
    rank.live(press_ctrl_c)
    ((arguments, options),) = rank.front_ends
    assert arguments == (COORDINATOR, "tokenizer", 0, expected[0])
    assert options["num_replicas"] == expected[1]
    assert options["hostname"] == "127.0.0.1"
    assert (options["vocab_size"], options["model_name"]) == (260, "megatron")
    assert options["max_sequence_tokens"] == 8192
    assert (options["parsers"], options["verbose"]) == ([], False)
    assert (options["api_keys"], options["limits"]) == (access.ApiKeys(), HttpSettings())


def test_front_ends_get_keys_and_limits_and_the_example_shows_a_key(life, monkeypatch, capsys):
    monkeypatch.setenv("MEGATRON_API_KEY", "sesame")
    rank = life("--http-max-body-mib", "3", "--host", "0.0.0.0", "--port", "80")
    rank.live(press_ctrl_c)
    ((_, options),) = rank.front_ends
    assert options["api_keys"] == access.ApiKeys(["sesame"])
    assert options["limits"].largest_body(8192) == 3 * 2**20
    out = capsys.readouterr().out
    assert ' -H "Authorization: Bearer $KEY" -d ' in out
    assert "sesame" not in out
    assert "everybody" not in out


def test_a_server_that_lets_everybody_in_says_so(life, capsys):
    life("--host", "0.0.0.0", "--port", "80").live(press_ctrl_c)
    assert (
        "[server] note: everybody who reaches 0.0.0.0 may send requests; --api-key or "
        "MEGATRON_API_KEY asks them for a key\n"
    ) in capsys.readouterr().out


def test_what_the_engine_is_started_with(life):
    rank = life(
        *("--inference-coordinator-port", "6000", "--inference-coordinator-host", "10.1.1.1"),
        *("--coordinator-schedule-output", "decisions.json"),
    )
    rank.live(press_ctrl_c)
    options = {"hostname": "10.1.1.1", "coordinator_schedule_output_path": "decisions.json"}
    assert rank.engine.started == (6000, options)


def test_other_ranks_host_front_ends_only_when_asked_and_say_nothing(life, capsys):
    silent = life(rank=1)
    silent.others = [("http://127.0.0.1:5000", False)]
    silent.live(press_ctrl_c)
    assert silent.front_ends == []
    hosting = life("--frontend-on-all-ranks", rank=1)
    hosting.others = [("http://127.0.0.1:5000", False)]
    hosting.live(press_ctrl_c)
    assert len(hosting.front_ends) == 1
    assert capsys.readouterr() == ("", "")


def test_addresses_of_all_ranks_are_told_in_their_order(life, tmp_path, capsys):
    url_file = tmp_path / "urls.json"
    rank = life("--frontend-on-all-ranks", "--url-file", str(url_file), dp=4)
    rank.others = [("http://127.0.0.1:6001", False), (None, False), ("http://10.0.0.2:1", False)]
    rank.live(press_ctrl_c)
    urls = ["http://127.0.0.1:5555", "http://127.0.0.1:6001", "http://10.0.0.2:1"]
    assert json.loads(url_file.read_text()) == {"urls": urls}
    out = capsys.readouterr().out
    assert "[server] starting 4 HTTP front ends on every rank\n" in out
    assert [line for line in out.splitlines() if "serving at" in line] == [
        f"[server] serving at {url}/v1" for url in urls
    ]
    assert f"curl {urls[0]}/v1/completions" in out


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_server_on_all_interfaces_names_one_that_others_reach(life, host, capsys):
    rank = life("--host", host, "--port", "80")
    rank.live(press_ctrl_c)
    ((_, options),) = rank.front_ends
    assert options["hostname"] == host
    assert "[server] serving at http://10.1.1.1:80/v1\n" in capsys.readouterr().out


def test_the_url_file_appears_whole_and_only_at_the_end(life, tmp_path, monkeypatch):
    url_file = tmp_path / "urls.json"
    seen = []
    replace = Path.replace

    def watched(self: Path, target: Path) -> Path:
        seen.append((url_file.exists(), json.loads(self.read_text()), target))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", watched)
    rank = life("--url-file", str(url_file))
    start = rank.start_text_gen_server

    def start_text_gen_server(*args: Any, **options: Any) -> str:
        assert not list(tmp_path.iterdir())
        return start(*args, **options)

    monkeypatch.setattr(http, "start_text_gen_server", start_text_gen_server)
    rank.live(press_ctrl_c)
    urls = {"urls": ["http://127.0.0.1:5000"]}
    assert seen == [(False, urls, url_file)]
    assert url_file.read_text() == json.dumps(urls) + "\n"
    assert list(tmp_path.iterdir()) == [url_file]


def test_the_addresses_go_into_no_file_of_anybody_else(life, tmp_path):
    url_file, others = tmp_path / "a.json", tmp_path / "others"
    others.write_text("precious")
    for name in ("a.json", "a.partial", "a.json.partial"):
        (tmp_path / name).symlink_to(others)
    life("--url-file", str(url_file)).live(press_ctrl_c)
    assert json.loads(url_file.read_text()) == {"urls": ["http://127.0.0.1:5000"]}
    assert not url_file.is_symlink()
    assert url_file.stat().st_mode & 0o133 == 0
    assert others.read_text() == "precious"


# --- ending --------------------------------------------------------------------------------------


def test_a_signal_ends_front_ends_then_engine_then_coordinator(life):
    rank = life()
    rank.live(press_ctrl_c)
    assert rank.did == ["gathered", "front ends ended", "engine ended", "coordinator ended"]
    assert rank.engine._prefix_routing.ending  # who is gone now is no error


def test_a_signal_on_a_rank_without_a_coordinator(life):
    rank = life(rank=1)
    rank.others = [("http://127.0.0.1:5000", False)]
    rank.live(press_ctrl_c)
    assert rank.did == ["gathered", "front ends ended", "engine ended"]


def test_signals_that_come_twice_or_too_late_are_harmless(life):
    def press_twice(life: Life) -> None:
        life.stop()
        life.stop()

    rank = life()
    rank.live(press_twice)
    rank.stop()  # the event loop is closed by now
    assert rank.did[-1] == "coordinator ended"


def test_an_engine_that_fails_ends_everything_and_its_error_is_told(life):
    def fail(life: Life) -> None:
        life.engine.fail._loop.call_soon_threadsafe(life.engine.fail.set)

    rank = life()
    with pytest.raises(RuntimeError, match="the coordinator died"):
        rank.live(fail)
    assert rank.did == ["gathered", "engine ended", "front ends ended", "coordinator ended"]


def test_an_engine_that_was_told_to_stop_ends_everything_without_an_error(life):
    def stop(life: Life) -> None:
        life.engine.stop._loop.call_soon_threadsafe(life.engine.stop.set)

    rank = life()
    rank.live(stop)
    assert rank.did == ["gathered", "engine ended", "front ends ended", "coordinator ended"]


def test_front_ends_that_do_not_start_end_everything_on_all_ranks(life, tmp_path, capsys):
    url_file = tmp_path / "urls.json"
    rank = life("--url-file", str(url_file))
    rank.front_end_failure = OSError("port 5000 is in use")
    with pytest.raises(OSError, match="port 5000 is in use"):
        rank.live(press_ctrl_c)
    assert rank.did == ["gathered", "front ends ended", "engine ended", "coordinator ended"]
    assert "ready" not in capsys.readouterr().out
    assert not url_file.exists()


def test_a_rank_ends_when_another_s_front_ends_do_not_start(life, capsys):
    rank = life("--frontend-on-all-ranks", rank=1)
    rank.others = [(None, True)]
    with pytest.raises(SystemExit) as stopped:
        rank.live(press_ctrl_c)
    assert stopped.value.code == 1
    assert capsys.readouterr() == ("", "")


# --- joining a coordinator that runs alone -------------------------------------------------------

JOIN = "--inference-coordinator-address=tcp://10.1.1.1:5100"
DRAIN = "--inference-coordinator-drain-seconds"


def test_how_long_a_job_drains_by_default_is_less_than_torchrun_gives_it(parsed):
    args = parsed()
    assert args.inference_coordinator_address is None
    assert args.inference_coordinator_drain_seconds == 20


def test_a_job_that_joins_needs_no_front_ends(parsed):
    tool._check(parsed(JOIN, "--frontend-replicas=0"), rank=0)


@pytest.mark.parametrize("address", ["10.1.1.1:5100", "tcp://10.1.1.1", "tcp://:x", "http://a:1"])
def test_an_address_that_is_none_is_told(parsed, address):
    with pytest.raises(SettingsError, match=r"^--inference-coordinator-address is .*; give tcp:"):
        tool._check(parsed(f"--inference-coordinator-address={address}"), rank=0)


@pytest.mark.parametrize("seconds", ["-1", "inf", "nan"])
def test_a_drain_time_that_is_none_is_told(parsed, seconds):
    with pytest.raises(SettingsError, match=rf"^{DRAIN} is {seconds}; give a number of 0 or more"):
        tool._check(parsed(f"{DRAIN}={seconds}"), rank=0)


@pytest.mark.parametrize(
    "flag",
    [
        "--inference-coordinator-port=6000",
        "--inference-coordinator-record=requests.jsonl",
        "--coordinator-schedule-output=decisions.json",
    ],
)
def test_what_is_for_a_coordinator_of_the_job_s_own_is_refused_beside_it(parsed, flag):
    name = flag.partition("=")[0]
    with pytest.raises(SettingsError, match=rf"^{name} is for a coordinator that this job starts"):
        tool._check(parsed(JOIN, flag), rank=0)


@pytest.mark.parametrize(
    ("rank", "flags", "warmed"),
    [(0, ["--frontend-replicas=0"], 0), (0, [], 1), (1, [], 0)],
)
def test_a_job_that_joins_warms_a_fork_server_for_front_ends_alone(built, rank, flags, warmed):
    assert built(JOIN, *flags, rank=rank).warmed == warmed


def test_a_job_that_joins_starts_no_coordinator_and_says_what_it_is_part_of(life, tmp_path, capsys):
    url_file = tmp_path / "urls.json"
    rank = life(JOIN, "--frontend-replicas=0", "--url-file", str(url_file), dp=1)
    rank.live(leave_at_once)
    options = {"hostname": None, "coordinator_address": "tcp://10.1.1.1:5100"}
    assert rank.engine.started == (None, options)
    assert rank.front_ends == []
    assert json.loads(url_file.read_text()) == {"urls": []}
    assert capsys.readouterr().out.splitlines() == [
        "[server] joining the coordinator at tcp://10.1.1.1:5100",
        "[server] ready: 1 replica, part of tcp://10.1.1.1:5100",
        "[server] leaving: no new requests, and up to 20 s for those at hand",
        "[server] stopping",
    ]


def leave_at_once(life: Life) -> None:
    """A signal comes; the engine has nothing to answer."""
    life.engine.requests = {}
    life.stop()
    assert life.engine._prefix_routing.leaving
    assert not life.engine._prefix_routing.ending  # others must still be there
    life.engine.stop._loop.call_soon_threadsafe(life.engine.stop.set)


def test_engine_and_front_ends_answer_what_they_have_before_anything_ends(life):
    rank = life(JOIN)
    rank.live(leave_at_once)
    front_ends, engine = sorted(rank.did[1:3], reverse=True)
    assert (front_ends, engine) == ("front ends have 20 s", "engine ended")
    assert rank.did[3:] == ["front ends ended"]
    assert rank.limits == (23.5, 0)  # then it is ended in any case; an orderly end is no error


def test_what_is_not_answered_in_time_is_told_and_left_to_others(life, capsys):
    def leave(life: Life) -> None:
        life.engine.requests = {1: "request"}
        life.engine._prefix_routing.queue = {2: "request that the engine has not taken yet"}
        life.stop()

    rank = life(JOIN, f"{DRAIN}=0.2")
    rank.live(leave)
    assert rank.did[-2:] == ["front ends ended", "engine ended"]
    assert rank.engine._prefix_routing.ending  # ranks that wait for the first one give up
    out = capsys.readouterr().out
    assert "2 requests not answered in time: the coordinator gives them to others\n" in out


def test_a_signal_before_a_job_has_joined_ends_it_as_any_other(life):
    rank = life(JOIN)
    rank.front_end_failure = OSError("port 5000 is in use")
    with pytest.raises(OSError, match="in use"):
        rank.live(press_ctrl_c)
    assert rank.limits == ()


def test_an_engine_of_a_job_that_joined_may_fail_too(life):
    def fail(life: Life) -> None:
        life.engine.fail._loop.call_soon_threadsafe(life.engine.fail.set)

    rank = life(JOIN)
    with pytest.raises(RuntimeError, match="the coordinator died"):
        rank.live(fail)
    assert rank.did == ["gathered", "engine ended", "front ends ended"]


# --- main ----------------------------------------------------------------------------------------


@pytest.fixture
def main(monkeypatch) -> Callable[[BaseException | None], list[str]]:
    """`main(error)`: runs it, its building made up; returns what it did."""
    did: list[str] = []

    class StopSignal:
        def on_stop(self, callback: Callable[[], None]) -> None:
            did.append("on_stop")

        def exit_if_stopped(self) -> None:
            did.append("exit_if_stopped")

    class Server:
        def __init__(self, setup: Any):
            assert setup == "setup"

        async def serve(self, on_stop: Callable) -> None:
            on_stop(lambda: None)
            did.append("served")

    def run(error: BaseException | None) -> list[str]:
        def build(argv: list[str], rank: int) -> str:
            if error is not None:
                raise error
            return "setup"

        monkeypatch.setattr(tool, "_quiet", lambda: None)
        monkeypatch.setattr(tool, "_build", build)
        monkeypatch.setattr(serving, "Server", Server)
        monkeypatch.setattr(stop_signal, "StopSignal", StopSignal)
        tool.main([])
        return did

    return run


def test_main_serves_and_leaves_quickly_after_a_signal(main):
    assert main(None) == ["on_stop", "served", "exit_if_stopped"]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (SettingsError("--port is -1; give a port from 0 to 65535"), "--port is -1; give"),
        (OSError(98, "port 5000 is in use"), "port 5000 is in use"),
        (FileNotFoundError("No checkpoint in x"), "No checkpoint in x"),
    ],
)
def test_what_a_user_can_mend_is_told_without_a_traceback(main, monkeypatch, error, text):
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit) as stopped:
        main(error)
    assert stopped.value.code.startswith(f"[rank 3] error: {text}")


def test_no_text_in_a_rank_s_log_looks_like_a_line_of_its_own(monkeypatch):
    said = io.StringIO()
    root = logging.Logger("root")
    root.addHandler(logging.StreamHandler(said))
    monkeypatch.setattr(logging, "getLogger", lambda name=None: root)
    with pytest.raises(FileNotFoundError):
        tool._build(["--load=/no/such/checkpoint"], rank=0)
    root.warning("model %s failed", "x\n2030-01-01 INFO\x1b[2K")
    assert said.getvalue().endswith(" WARNING model x\\n2030-01-01 INFO\\x1b[2K failed\n")


def test_a_file_at_fault_is_named():
    assert tool._text_of(PermissionError(1, "is not a plain file", "a")) == "a: is not a plain file"


def test_what_nobody_expects_keeps_its_traceback(main):
    with pytest.raises(KeyError):
        main(KeyError("a bug"))


# --- the launcher --------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch) -> Callable[..., tuple[int, list]]:
    """`launched(*flags)`: exit code, and what the launcher was asked to run."""

    def start(*flags: str) -> tuple[int, list]:
        ran = []

        def run(replicas: int, command: list[str], **options: Any) -> int:
            ran.append((replicas, command, options))
            return 0

        monkeypatch.setattr(serve, "run_processes", run)
        return serve.launch(list(flags)), ran

    return start


def test_the_processes_meet_where_the_launcher_says():
    assert launch.STORE_VARIABLE == model.STORE_VARIABLE


def test_a_job_that_joins_has_all_the_time_it_was_given_to_drain(launched):
    for flags in ([JOIN], JOIN.split("=")):
        _, ((_, _, options),) = launched(*flags)
        assert options["stop_seconds"] == float("inf")
    _, ((_, _, options),) = launched()
    assert options["stop_seconds"] == 30


def test_two_replicas_by_default(launched, capsys):
    code, ((replicas, command, _),) = launched()
    assert code == 0
    assert replicas == 2
    assert command == [str(TOOLS / "run_dynamic_text_generation_server.py")]
    assert capsys.readouterr().out.startswith("[serve] starting 2 process(es)")


@pytest.mark.parametrize("replicas", [["--replicas", "3"], ["--replicas=3"]])
def test_all_other_flags_go_to_the_tool_as_they_are(launched, replicas):
    flags = ["--port", "0", "--load=x y", "--frontend-replicas", "-1", "--parsers", "json", "tool"]
    _, ((count, command, _),) = launched(*flags[:4], *replicas, *flags[4:])
    assert count == 3
    assert command[1:] == flags


@pytest.mark.parametrize("replicas", ["0", "-1"])
def test_no_replica_is_an_error_of_one_sentence(launched, replicas, capsys):
    code, ran = launched("--replicas", replicas)
    assert (code, ran) == (2, [])
    assert capsys.readouterr().err == f"error: --replicas is {replicas}; give 1 or more\n"


def test_replicas_that_are_no_number_are_refused(launched):
    with pytest.raises(SystemExit) as stopped:
        launched("--replicas", "many")
    assert stopped.value.code == 2


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ("sys.exit(3)", 3, "[serve] a process ended with exit code 3\n"),
        ("sys.exit(130)", 130, "[serve] a process ended with exit code 130\n"),
        ("os.kill(os.getpid(), 9)", 1, "[serve] a process ended with exit code -9\n"),
        # As if it still imported: Python's own handler would print a traceback.
        ("os.kill(os.getppid(), 2); signal.pause()", 130, "[serve] stopped\n"),
    ],
)
def test_how_it_ends(tmp_path, ends, code, said):
    script = tmp_path / "script.py"
    script.write_text(f"import os, signal, sys\n{ends}\n")
    start = (
        f"import pathlib, sys; sys.path.insert(0, {str(TOOLS)!r}); import serve; "
        f"serve.TOOL = pathlib.Path({str(script)!r}); sys.exit(serve.launch(['--replicas=1']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", start], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code
    assert (done.stdout + done.stderr).endswith(said)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("flag", ["-h", "--help", "--help-all"])
def test_help_is_the_launcher_s_and_one_tool_s(launched, capsys, flag):
    _, ((replicas, command, _),) = launched(flag, "--replicas", "4")
    assert replicas == 1
    assert command[1:] == [flag]
    assert "--replicas N" in capsys.readouterr().out
