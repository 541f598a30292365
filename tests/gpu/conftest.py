"""What the tests share that run on a GPU where there is one, and on the CPU at small sizes.

    pytest -m gpu tests/gpu

Together with other tests they stay on the CPU, as tests/unit_tests/conftest.py has it.
"""

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.with_name("end_to_end")))

FIGURES = pytest.StashKey[dict[str, Any]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> str:
    """`cuda` or `cpu`."""
    from megatron.core.inference.coordinator.runtime import model

    return model.device_type()


@pytest.fixture(scope="session")
def sizes(device: str) -> Any:
    from engines import SIZES

    return SIZES[device]


@pytest.fixture(scope="session")
def model_arguments(device: str, model_arguments: Sequence[str]) -> Sequence[str]:
    from engines import GPU_MODEL

    return [*model_arguments, *(GPU_MODEL if device == "cuda" else ())]


@pytest.fixture(scope="session")
def attention(device: str) -> str:
    """Which attention serves in this process."""
    from graph_safe_attention import install

    return install() if device == "cuda" else "torch (overrides 4 to 6 of runtime/cpu_device.py)"


@pytest.fixture(scope="session")
def make_engine(
    device: str, attention: str, sizes: Any, request: pytest.FixtureRequest
) -> Callable[..., Any]:
    """`make_engine(**fields)`: as `cpu_engine`, with CUDA graphs on a GPU. One at a time."""
    from megatron.core.inference.coordinator.runtime import fork_server

    fork_server.warm_up()  # while the model is built
    make_plain = request.getfixturevalue("cpu_engine")

    def make(**fields: Any) -> Any:
        if device == "cuda":
            gc.collect()  # the engine before it, which is in cycles
            _forget_graphs(request.getfixturevalue("built_in_model"))
        # Graphs of mixed steps are for the server's test: capturing all takes a minute.
        graphs = {"use_cuda_graphs_for_non_decode_steps": False}
        engine = make_plain(block_size_tokens=sizes.block, **graphs, **fields)
        assert device == "cpu" or engine.capture_stats["pool_reserved_bytes"] > 0, "no graph"
        return engine

    return make


def _forget_graphs(model: Any) -> None:
    """Graphs belong to the model and read the buffers of the engine that captured them."""
    import torch
    from megatron.core.transformer.cuda_graphs import CudaGraphManager, delete_cuda_graphs

    delete_cuda_graphs()
    CudaGraphManager.global_mempool = torch.cuda.graph_pool_handle()  # one for all, as at first
    for module in model.modules():
        if isinstance(module, CudaGraphManager):
            module.cudagraph_runners.clear()
            module.custom_cudagraphs_lookup_table.clear()


@pytest.fixture
def figures(request: pytest.FixtureRequest, device: str, attention: str) -> Callable[..., None]:
    """`figures(part, name=value, …)`: for the table at the end, and build/gpu.json."""
    found = request.config.stash.setdefault(FIGURES, {})
    found.setdefault("machine", _machine(device, attention))

    def note(part: str, **values: Any) -> None:
        found.setdefault(part, {}).update(values)

    return note


def _machine(device: str, attention: str) -> dict[str, Any]:
    about = {
        "device": _said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
        if device == "cuda"
        else "CPU: these figures say nothing about a GPU",
        "attention": attention,
        "commit": _said("git", "describe", "--always", "--dirty", default=_packed_commit()),
        "python": sys.version.split()[0],
    }
    for name in ("torch", "megatron-core", "flash-attn", "transformer-engine", "pyzmq"):
        try:
            about[name] = version(name)
        except PackageNotFoundError:
            about[name] = "-"
    return about


def _packed_commit() -> str:
    """What pack.sh noted, for a machine that got the files without their history."""
    path = ROOT / "build" / "gpu-pack" / "commit"
    return path.read_text().strip() if path.exists() else "unknown"


def _said(*command: str, default: str = "unknown") -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return default
    return done.stdout.strip()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    found = config.stash.get(FIGURES, None)
    if not found:
        return
    path = ROOT / "build" / "gpu.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n")
    terminalreporter.section("GPU figures (build/gpu.json)")
    for part, values in found.items():
        for name, value in values.items():
            shown = f"{value:.3g}" if isinstance(value, float) else value
            terminalreporter.line(f"{part:<24} {name.replace('_', ' '):<40} {shown}")
