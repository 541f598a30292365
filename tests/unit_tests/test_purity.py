"""Pure modules stay pure, and importing the package patches nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import megatron.core.inference.coordinator as package

ROOT = Path(package.__file__).parent
PURE = sorted(path for path in ROOT.glob("*.py") if path.name != "__init__.py")
BANNED = {
    *("asyncio", "logging", "msgpack", "multiprocessing", "random"),
    *("socket", "threading", "time", "torch", "zmq"),
}


def imported(path):
    """The full names that a module imports, at any depth of its code."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_all_pure_modules_are_looked_at():
    assert {path.stem for path in PURE} >= {
        *("core", "decision", "hashing", "index", "ledger", "lifecycle", "messages"),
        *("policies", "ranks", "router", "settings", "arguments"),
    }


@pytest.mark.parametrize("path", PURE, ids=lambda path: path.stem)
def test_a_pure_module_imports_no_io_clock_or_framework(path):
    tops = {name.split(".")[0] for name in imported(path)}
    assert not tops & BANNED


@pytest.mark.parametrize("path", PURE, ids=lambda path: path.stem)
def test_a_pure_module_imports_nothing_of_runtime(path):
    assert not {name for name in imported(path) if ".coordinator.runtime" in name}


@pytest.mark.parametrize("path", PURE, ids=lambda path: path.stem)
def test_of_megatron_core_a_pure_module_imports_only_its_configuration(path):
    ours = "megatron.core.inference.coordinator"
    theirs = {n for n in imported(path) if n.startswith("megatron.") and not n.startswith(ours)}
    assert all(name.startswith("megatron.core.inference.config") for name in theirs)


def test_importing_the_package_patches_nothing():
    """In an interpreter of its own: what is looked at was released, by its own module names."""
    script = """
import importlib, json
import megatron.core.inference.coordinator
import megatron.core.inference.coordinator.runtime.engine_end
from megatron.core.inference.coordinator.runtime import patching
for module, name, ours in patching._replacements():
    owner = importlib.import_module(module) if isinstance(module, str) else module
    found = getattr(owner, name)
    assert found is not ours, name
    assert not found.__module__.startswith("megatron.core.inference.coordinator"), name
print("unpatched")
"""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=False
    )
    assert result.stdout.strip() == "unpatched", result.stderr
