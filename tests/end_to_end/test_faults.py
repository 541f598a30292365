"""What a user sees when something is wrong: in a request, at start, or in the middle."""

import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit
from urllib.request import urlopen

import openai
import psutil
import pytest
from openai import OpenAI
from serving import serve


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serve(tmp_path_factory.mktemp("faults"), "--model-name=tiny") as running:
        yield running


@pytest.fixture
def client(served) -> OpenAI:
    return OpenAI(base_url=f"{served.urls[0]}/v1", api_key="none", max_retries=0)


def test_the_model_is_listed_and_named(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.completions.create(model="tiny", prompt="Hi", max_tokens=1).model == "tiny"


def test_n_gives_that_many_choices_in_order(client):
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hi"}], n=3, max_tokens=2
    )
    assert [choice.index for choice in chat.choices] == [0, 1, 2]
    completions = client.completions.create(
        model="tiny", prompt=["A", "B"], n=2, max_tokens=2, temperature=0
    )
    texts = [choice.text for choice in completions.choices]
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]
    assert completions.usage.prompt_tokens == 2


@pytest.mark.parametrize(
    ("request_body", "message"),
    [
        ({"prompt": "Hi", "temperature": -1}, "temperature"),
        ({"prompt": [5, 10**6]}, "token"),
        ({"prompt": "Hi", "top_p": 7}, "top_p"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": "Hi", "stream": True}, "stream"),
    ],
)
def test_a_bad_request_is_answered_with_400_and_says_what_is_wrong(client, request_body, message):
    with pytest.raises(openai.BadRequestError, match=message) as refused:
        client.post("/completions", body={"model": "tiny"} | request_body, cast_to=object)
    assert refused.value.body["type"] == "invalid_request_error"


def test_a_prompt_longer_than_the_context_is_answered_with_400(client):
    with pytest.raises(openai.BadRequestError, match="maximum context length") as refused:
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x" * 9000}]
        )
    assert refused.value.body["code"] == "context_length_exceeded"


def test_sampling_that_ends_a_released_engine_is_answered(client):
    completion = client.completions.create(
        model="tiny", prompt="Hi", max_tokens=2, extra_body={"top_k": 5}
    )
    assert completion.usage.completion_tokens == 2
    with pytest.raises(openai.BadRequestError, match="does not take top_k and top_p together"):
        client.completions.create(model="tiny", prompt="Hi", top_p=0.5, extra_body={"top_k": 5})


def test_front_ends_that_die_under_load_are_replaced(served, client):
    """Clients that try again, as openai's do, get every answer."""
    port = urlsplit(served.urls[0]).port
    before = {process for process in served.processes() if _listens(process, port)}
    patient = client.with_options(max_retries=10)

    def ask(number: int) -> int:
        answer = patient.completions.create(model="tiny", prompt=f"No. {number}", max_tokens=16)
        return answer.usage.completion_tokens

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, number) for number in range(64)]
        for process in before:
            process.kill()
            time.sleep(0.2)
        assert all(0 < each.result(120) <= 16 for each in asked)
    deadline = time.monotonic() + 60
    while len({p for p in served.processes() if _listens(p, port)} - before) < len(before):
        assert time.monotonic() < deadline, "not all were replaced"
        time.sleep(0.1)
    assert served.log.count("http_frontend_restarts") == len(before) == 4
    with urlopen(f"{served.urls[0]}/health", timeout=60) as health:
        assert health.status == 200


def test_a_coordinator_that_dies_ends_the_job_with_its_last_error(served, client):
    """The last test of this file: the server is gone after it."""
    assert client.completions.create(model="tiny", prompt="Hi", max_tokens=1)
    (port,) = re.findall(r"listening address='tcp://127\.0\.0\.1:(\d+)'", served.log)
    everybody = served.processes()
    (coordinator,) = [process for process in everybody if _listens(process, int(port))]
    coordinator.send_signal(signal.SIGKILL)
    assert served.process.wait(timeout=60) != 0
    _, alive = psutil.wait_procs(everybody, timeout=5)
    assert alive == []
    assert "the coordinator process (pid" in served.log
    assert "died: killed by SIGKILL" in served.log


def _listens(process: psutil.Process, port: int) -> bool:
    try:
        connections = process.net_connections(kind="tcp")
    except psutil.Error:
        return False
    return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections)


def test_a_port_in_use_is_one_sentence(tmp_path):
    import subprocess
    import sys

    from serving import ROOT

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, str(ROOT / "tools" / "serve.py"), f"--port={port}"]
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False
        )
    assert ended.returncode == 1
    assert f"error: port {port} is in use on 127.0.0.1" in ended.stderr
    assert "Traceback" not in ended.stderr
