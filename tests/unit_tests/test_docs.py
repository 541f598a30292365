"""README and docs say what the code says."""

import argparse
import importlib.util
import re
from pathlib import Path

import pytest

from megatron.core.inference.coordinator.lifecycle import mermaid
from megatron.core.inference.coordinator.runtime.http.limits import HttpSettings
from megatron.core.inference.coordinator.settings import (
    AccessSettings,
    FleetSettings,
    RecordSettings,
    RoutingSettings,
)

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples/README.md"]


@pytest.mark.parametrize(
    "settings",
    [RoutingSettings, FleetSettings, AccessSettings, RecordSettings, HttpSettings],
)
def test_the_readme_shows_the_options_as_they_are(settings):
    assert settings.markdown_table() in (ROOT / "README.md").read_text()


def test_the_architecture_shows_the_state_diagram_as_it_is():
    assert f"```mermaid\n{mermaid()}```" in (ROOT / "docs/architecture.md").read_text()


def test_every_flag_of_the_readme_exists():
    spec = importlib.util.spec_from_file_location(
        "server_tool", ROOT / "tools/run_dynamic_text_generation_server.py"
    )
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    parser = tool.add_server_args(argparse.ArgumentParser())
    known = set(parser._option_string_actions)
    table = (ROOT / "README.md").read_text().split("## Serve your own model")[1].split("##")[0]
    flags = set(re.findall(r"^\| `(--[a-z-]+)", table, re.MULTILINE))
    assert {"--host", "--frontend-on-all-ranks"} <= flags
    others = {"--inference-coordinator-port", "--replicas"}  # Megatron's, and the launcher's
    assert flags - known <= others


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_rooms_of_the_architecture_are_the_modules_there_are():
    package = ROOT / "megatron/core/inference/coordinator"
    rooms = (ROOT / "docs/architecture.md").read_text().split("```")[1]
    for path in [*package.glob("*.py"), *(package / "runtime").glob("*.py")]:
        if path.stem not in ("__init__", "arguments"):
            assert re.search(rf"\b{path.stem}\b", rooms), path.stem
