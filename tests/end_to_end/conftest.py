"""Runs of the same conversations on servers of different kinds; each server starts once."""

import pytest
from conversations import Run, five_turn_chat, hold_conversations
from greed import Waits, wait_beside_greed
from serving import Served, serve

FLAG = "--inference-dynamic-batching-prefix-caching"


@pytest.fixture(scope="session")
def affinity(tmp_path_factory) -> tuple[Run, Served, int]:
    """The default server's run, the server after Ctrl-C, and its exit code."""
    with serve(tmp_path_factory.mktemp("affinity")) as served:
        run = hold_conversations(served.urls)
        five_turn_chat(served.urls[0])
        code = served.stop()
    return run, served, code


@pytest.fixture(scope="session")
def added_delay(tmp_path_factory) -> tuple[Run, Served]:
    """The same with the cost policy that goes by queues and conversations."""
    with serve(tmp_path_factory.mktemp("added_delay"), f"{FLAG}-cost-policy=added_delay") as served:
        run = hold_conversations(served.urls)
        served.stop()
    return run, served


@pytest.fixture(scope="session")
def reference(tmp_path_factory) -> tuple[Run, Served]:
    """One engine without prefix caching."""
    folder = tmp_path_factory.mktemp("reference")
    with serve(folder, "--no-inference-dynamic-batching-prefix-caching", replicas=1) as served:
        run = hold_conversations(served.urls)
        served.stop()
    return run, served


@pytest.fixture(scope="session")
def load_balanced(tmp_path_factory) -> tuple[Run, Served, Waits]:
    """The control: the same engines, routed by load alone; front ends on all ranks.

    Then one of them is asked for too much, as no server is in another test.
    """
    folder = tmp_path_factory.mktemp("load_balanced")
    flags = [f"{FLAG}-coordinator-policy=load_balanced", "--frontend-on-all-ranks"]
    with serve(folder, *flags, "--frontend-replicas=1") as served:
        run = hold_conversations(served.urls)
        waits = wait_beside_greed(served.urls[0])
        served.stop()
    return run, served, waits


@pytest.fixture(scope="session")
def tensor_parallel(tmp_path_factory) -> tuple[Run, Served]:
    """Two replicas of two ranks each, over gloo."""
    folder = tmp_path_factory.mktemp("tensor_parallel")
    flags = ["--tensor-model-parallel-size=2", "--frontend-replicas=1"]
    with serve(folder, *flags, replicas=4) as served:
        return hold_conversations(served.urls), served
