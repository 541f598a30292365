"""The examples: every flag is one of torchrun, Megatron or the tool, and the Python files run."""

import argparse
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "end_to_end"))

from listening import beyond_loopback, run_and_look

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
TOOL = ROOT / "tools" / "run_dynamic_text_generation_server.py"
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")

CPU, ONE_NODE, MULTI_NODE = "serve_cpu.sh", "serve_one_node_8gpu.sh", "serve_multi_node.sh"
SLURM = "serve_slurm.sh"
SCRIPTS = (CPU, ONE_NODE, MULTI_NODE, SLURM)
MODEL = {"CHECKPOINT": "/check points/mine", "TOKENIZER": "/tokenizers/mine"}
NODE = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "SERVE_HOST": "10.0.0.2"}
FLAGS_OF_OTHERS = {
    SLURM: {"--job-name", "--nodes", "--ntasks-per-node", "--gpus-per-node", "--exclusive"}
    | {"--time", "--kill-on-bad-exit"},
    "serve_ray.py": {"--ranks", "--gpus-per-rank"},
}
VARIABLES = {CPU: {}, ONE_NODE: MODEL, MULTI_NODE: MODEL | NODE, SLURM: MODEL}
JOB = {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NNODES": "2", "SLURM_SUBMIT_DIR": str(ROOT)}
"""What Slurm tells a script; `scontrol` and `srun` are below."""

CACHING = "inference_dynamic_batching_prefix_caching_"
CACHES_PREFIXES = {
    "inference_dynamic_batching_enable_prefix_caching": True,
    CACHING + "eviction_policy": "lru",
    CACHING + "coordinator_policy": "longest_prefix",
}
SERVES_A_CHECKPOINT = CACHES_PREFIXES | {
    "load": "/check points/mine",
    "use_checkpoint_args": True,
    "bf16": True,
    "use_tokenizer_model_from_checkpoint_args": False,
    "tokenizer_type": "HuggingFaceTokenizer",
    "tokenizer_model": "/tokenizers/mine",
    "tensor_model_parallel_size": 2,
    "inference_max_seq_length": 32768,
    "inference_dynamic_batching_buffer_size_gb": 40.0,
    "inference_dynamic_batching_block_size": 256,
}
SERVER = {
    CPU: CACHES_PREFIXES
    | {"device": "cpu", "load": None, "num_layers": None, "host": "127.0.0.1", "port": 5000}
    | {"inference_dynamic_batching_block_size": 64, "frontend_on_all_ranks": False},
    ONE_NODE: SERVES_A_CHECKPOINT
    | {"device": "auto", "host": "127.0.0.1", "port": 5000, "frontend_on_all_ranks": False},
    MULTI_NODE: SERVES_A_CHECKPOINT
    | {"device": "auto", "host": "10.0.0.2", "frontend_on_all_ranks": True}
    | {"url_file": Path("urls.json")},
}
SERVER[SLURM] = SERVER[MULTI_NODE] | {"host": "node1", "inference_coordinator_host": "node0"}
TORCHRUN = {
    CPU: {"standalone": True, "nproc_per_node": "2"},
    ONE_NODE: {"standalone": True, "nproc_per_node": "8"},
    MULTI_NODE: {"nnodes": "2", "node_rank": 1, "nproc_per_node": "8"}
    | {"master_addr": "10.0.0.1", "master_port": 29500},
}
TORCHRUN[SLURM] = TORCHRUN[MULTI_NODE] | {"master_addr": "node0"}
COMMANDS = {
    "torchrun": 'printf \'%s\\0\' "$CUDA_DEVICE_MAX_CONNECTIONS" "$@"',
    "scontrol": 'test "$*" = "show hostnames node[0-1]" && printf "node0\\nnode1\\n"',
    "srun": 'shift && SLURM_NODEID=1 SLURMD_NODENAME=node1 exec "$@"',
}


# --- The scripts, with a torchrun that only notes what it is given ---


@dataclass
class Launch:
    """What a script would start."""

    connections: str
    torchrun: argparse.Namespace
    server: argparse.Namespace


@pytest.fixture(scope="module")
def tool() -> dict[str, Any]:
    return runpy.run_path(str(TOOL))


@pytest.fixture(scope="module")
def parser(tool) -> argparse.ArgumentParser:
    """Megatron's real parser, with the flags of the tool."""
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    return tool["add_server_args"](parser)


@pytest.fixture
def start(tmp_path):
    """`start(script, *flags, **variables)`: run a script in an environment of just those."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, body in COMMANDS.items():
        (commands / name).write_text(f"#!/bin/sh\n{body}\n")
        (commands / name).chmod(0o755)
    path = f"{commands}:{os.environ['PATH']}"

    def run(script: str, *flags: str, **variables: str) -> subprocess.CompletedProcess:
        slurm = JOB if script == SLURM else {}
        return subprocess.run(
            [EXAMPLES / script, *flags],
            env={"PATH": path, "TORCHRUN": str(commands / "torchrun"), **slurm, **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    return run


@pytest.fixture
def launch(start, parser):
    """`launch(script, *flags)`: what a script starts, parsed by torchrun and by Megatron."""
    from torch.distributed.run import parse_args

    def parsed(script: str, *flags: str) -> Launch:
        done = start(script, *flags, **VARIABLES[script])
        assert done.returncode == 0, done.stderr
        connections, *command = done.stdout.split("\0")[:-1]
        torchrun = parse_args(command)
        assert Path(torchrun.training_script) == TOOL
        return Launch(connections, torchrun, parser.parse_args(torchrun.training_script_args))

    return parsed


@pytest.mark.parametrize("script", SCRIPTS)
def test_torchrun_and_the_server_get_what_is_intended(script, launch, tool):
    from megatron.core.inference.coordinator.arguments import routing_settings_from_args
    from megatron.core.inference.coordinator.settings import RoutingSettings

    started = launch(script)
    assert vars(started.torchrun) | TORCHRUN[script] == vars(started.torchrun)
    assert vars(started.server) | SERVER[script] == vars(started.server)
    tool["_check"](started.server, rank=0)
    assert routing_settings_from_args(started.server) == RoutingSettings()


@pytest.mark.parametrize("script", [ONE_NODE, MULTI_NODE, SLURM])
def test_tensor_parallelism_gets_the_variable_that_megatron_asks_for(script, launch):
    assert launch(script).connections == "1"


@pytest.mark.parametrize("script", SCRIPTS)
def test_flags_of_the_user_are_passed_on_and_win(script, launch):
    flags = ["--port", "8080", "--parsers", "json", "tool_use", "--model-name", "of two words"]
    server = launch(script, *flags, "--tensor-model-parallel-size=4").server
    assert (server.port, server.parsers) == (8080, ["json", "tool_use"])
    assert (server.model_name, server.tensor_model_parallel_size) == ("of two words", 4)


def test_the_options_that_are_commented_out_can_be_used(launch):
    text = (EXAMPLES / ONE_NODE).read_text()
    options = " ".join(re.findall(r"^ +# (--.*)$", text, re.MULTILINE))
    server = launch(ONE_NODE, *shlex.split(options)).server
    assert server.frontend_on_all_ranks
    assert (server.url_file, server.cuda_graph_impl) == (Path("urls.json"), "local")


@pytest.mark.parametrize(
    ("script", "name"), [(script, name) for script in SCRIPTS for name in VARIABLES[script]]
)
def test_a_missing_variable_is_named(script, name, start):
    variables = VARIABLES[script]
    done = start(script, **{key: value for key, value in variables.items() if key != name})
    assert done.returncode != 0
    assert f"{name}: set it to" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("file", [*SCRIPTS, "serve_ray.py", "README.md"])
def test_every_flag_that_is_named_exists(file, parser):
    from torch.distributed.run import get_args_parser

    known = {*parser._option_string_actions, *get_args_parser()._option_string_actions}
    known |= FLAGS_OF_OTHERS.get(file, set())
    assert set(FLAG.findall((EXAMPLES / file).read_text())) <= known


@pytest.mark.parametrize("script", SCRIPTS)
def test_bash_can_read_it(script):
    subprocess.run(["bash", "-n", EXAMPLES / script], check=True, timeout=30)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("script", SCRIPTS)
def test_shellcheck_finds_nothing(script):
    subprocess.run(["shellcheck", EXAMPLES / script], check=True, timeout=30)


# --- The script for Ray, with a Ray whose actors are objects here ---


class Ray:
    """What the script uses of Ray; a remote call happens at once and gives its result."""

    util = SimpleNamespace(
        get_node_ip_address=lambda: "10.0.0.1",
        placement_group=lambda bundles, strategy: SimpleNamespace(
            ready=lambda: "placed", bundles=bundles
        ),
        scheduling_strategies=SimpleNamespace(PlacementGroupSchedulingStrategy=lambda group: group),
    )

    def __init__(self):
        self.groups: list[Any] = []

    def init(self) -> None:
        pass

    def get(self, value: Any) -> Any:
        return value

    def wait(self, values: list[Any]) -> tuple[list[Any], list[Any]]:
        return values[:1], values[1:]

    def remote(self, **resources: int) -> Any:
        def options(scheduling_strategy: Any) -> Any:
            self.groups.append((resources, scheduling_strategy.bundles))
            return SimpleNamespace(remote=made)

        def made() -> Any:
            rank = self.kind()
            methods = {"address": rank.address, "serve": rank.serve}
            return SimpleNamespace(
                **{name: SimpleNamespace(remote=method) for name, method in methods.items()}
            )

        def of(kind: type) -> Any:
            self.kind = kind
            return SimpleNamespace(options=options)

        return of


def test_ray_s_actors_start_the_tool_with_what_it_needs(monkeypatch, parser):
    started: list[tuple[list[str], dict[str, str]]] = []
    fake = Ray()
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(
        subprocess, "call", lambda command, env: started.append((command, env)) or 0
    )
    script = runpy.run_path(str(EXAMPLES / "serve_ray.py"))
    flags = ["--load", "/check points/mine", "--use-checkpoint-args", "--bf16"]
    flags += ["--tensor-model-parallel-size", "2"]
    with pytest.raises(SystemExit) as ended:
        script["main"](["--ranks", "4", *flags])
    assert ended.value.code == 0
    assert fake.groups == [({"num_cpus": 1, "num_gpus": 1}, [{"CPU": 1.0, "GPU": 1}] * 4)] * 4
    for rank, (command, env) in enumerate(started):
        assert command[:2] == [sys.executable, str(TOOL)]
        assert command[2:] == flags
        assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) == (str(rank), "0", "4")
        assert env["MASTER_ADDR"] == "10.0.0.1"
        assert env["MASTER_PORT"] == started[0][1]["MASTER_PORT"]
        assert env["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert parser.parse_args(started[0][0][2:]).tensor_model_parallel_size == 2


# --- The client, against a server that answers by rote ---


@dataclass
class FakeServer:
    """An OpenAI-compatible server that finds the request before cached.

    Attributes:
        url: Its base URL.
        requests: The chat requests so far.
    """

    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """One chat completion; a token is a character."""
        cached = _length(self.requests[-1]) if self.requests else 0
        prompt = _length(request)
        self.requests.append(request)
        message = {"role": "assistant", "content": f"Answer {len(self.requests)}."}
        usage = {"prompt_tokens": prompt, "completion_tokens": 9, "total_tokens": prompt + 9}
        return {
            "id": "chat",
            "object": "chat.completion",
            "created": 0,
            "model": request["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": usage | {"prompt_tokens_details": {"cached_tokens": cached}},
        }


def _length(request: dict[str, Any]) -> int:
    return sum(len(message["content"]) for message in request["messages"])


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    fake = FakeServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/v1/models"
            model = {"id": "fake-1", "object": "model", "created": 0, "owned_by": "us"}
            self._send({"object": "list", "data": [model]})

        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self._send(fake.answer(json.loads(body)))

        def _send(self, answer: dict[str, Any]) -> None:
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        fake.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield fake
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("how", ["url", "url as printed", "file"])
def test_the_client_chats_and_tells_what_was_cached(how, fake_server, tmp_path):
    url_file = tmp_path / "urls.json"
    url_file.write_text(json.dumps({"urls": [fake_server.url, fake_server.url]}))
    arguments = {
        "url": [fake_server.url],
        "url as printed": [f"{fake_server.url}/v1"],
        "file": ["--url-file", str(url_file)],
    }
    done = subprocess.run(
        [sys.executable, EXAMPLES / "client.py", *arguments[how]],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    roles = [[m["role"] for m in request["messages"]] for request in fake_server.requests]
    assert roles == [["system", *["user", "assistant"] * turn, "user"] for turn in range(4)]
    assert {request["model"] for request in fake_server.requests} == {"fake-1"}
    last = fake_server.requests[-1]["messages"]
    assert [m["content"] for m in last[2::2]] == ["Answer 1.", "Answer 2.", "Answer 3."]

    tokens = [_length(request) for request in fake_server.requests]
    lines = done.stdout.splitlines()
    for turn, cached in enumerate([0, *tokens[:-1]]):
        assert lines[turn].startswith(f"{cached} of {tokens[turn]} prompt tokens were cached: ")
        assert lines[turn].endswith(f"'Answer {turn + 1}.'")
    assert len(lines) == 4


# --- The script with the three lines, on two real engines ---


def test_an_existing_script_finds_the_turns_before_cached(tmp_path):
    script = EXAMPLES / "existing_script.py"
    launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node=2", script]
    done, listening = run_and_look(command, tmp_path, seconds=150, launcher=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert beyond_loopback(listening) == []  # but for torchrun itself
    turns = re.findall(r"^turn \d: cached (\[.*\]) of (\[.*\]) tokens$", done.stdout, re.MULTILINE)
    cached, lengths = ([json.loads(each) for each in column] for column in zip(*turns, strict=True))
    whole_blocks = [[length // 64 * 64 for length in turn] for turn in lengths]
    assert cached == [[0] * 4, *whole_blocks[:2]]


def test_the_three_lines_are_marked():
    marks = re.findall(r"# line (\d)", (EXAMPLES / "existing_script.py").read_text())
    assert marks == ["1", "2", "3"]
