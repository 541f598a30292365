"""The real server tool with a buffer that is too small, through weight updates; who holds a GPU."""

import asyncio
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from types import SimpleNamespace

import graph_safe_attention
import jobs
import main_thread_only
import pytest
from engines import ANSWER_SECONDS, agreement, room, tokens
from openai import AsyncOpenAI
from serving import ROOT, Served, serve

MODES = "persist", "recompute"
PROMPTS, ROOM = 12, 18
"""A prompt and its answer fill 4 blocks of the cache, and so many it has."""

STARTER = [
    *(ROOT / "tools" / "launch.py", "--processes=1", main_thread_only.__file__),
    *(graph_safe_attention.__file__, ROOT / "tools" / "run_dynamic_text_generation_server.py"),
]
"""The tool where a collective off the main thread fails, with an attention that graphs can hold."""

BATCHING = "--inference-dynamic-batching"


@pytest.fixture(scope="module")
def servers(device, sizes, model_arguments, tmp_path_factory) -> Iterator[dict[str, Served]]:
    """One for each way to keep the cache while suspended; they start at the same time."""
    flags = [
        *model_arguments,
        *(f"--inference-max-seq-length={16 * sizes.block}", f"{BATCHING}-block-size={sizes.block}"),
        f"{BATCHING}-buffer-size-gb={room(ROOM * sizes.block)}",
        *(f"{BATCHING}-max-requests=8", "--inference-coordinator-key-file=keys.json"),
        *("--frontend-replicas=1", "--inference-cuda-graph-max-tokens=8"),
    ]

    def start(mode: str) -> Served:
        mode_flag = f"--rl-kv-cache-management-mode={mode}"
        folder = tmp_path_factory.mktemp(mode)
        return stack.enter_context(serve(folder, *flags, mode_flag, starter=STARTER))

    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        yield dict(zip(MODES, pool.map(start, MODES), strict=True))


async def ask(http: AsyncOpenAI, prompt: list[int], count: int) -> tuple[list[int], int]:
    """The greedy answer, and how many tokens of the prompt were cached."""
    answer = await http.completions.create(
        model="megatron", prompt=prompt, max_tokens=count, temperature=0
    )
    cached = answer.usage.prompt_tokens_details.cached_tokens
    return list(answer.choices[0].generation_token_ids), cached


async def update_weights(served: Served, epoch: int) -> None:
    """A new epoch while the fleet is suspended, with whatever is in flight."""
    (address,) = re.findall(r" listening address='([^']+)'", served.log)
    lead = SimpleNamespace(address=address, key_file=served.folder / "keys.json")
    async with jobs.client_of(lead) as client:
        client.pause_engines()
        client.suspend_engines()
        client.set_generation_epoch(epoch)
        client.resume_engines()
        client.unpause_engines()
        # Behind the signals on the same connection, and answered when the engine runs again.
        await asyncio.wait_for(jobs.ask(client, tokens(9, epoch), 1), ANSWER_SECONDS)


@pytest.mark.parametrize("mode", MODES)
def test_answers_repeat_through_eviction_and_weight_updates(
    mode, servers, sizes, recomputed, figures
):
    served, count = servers[mode], 3 * sizes.block // 4
    prompts = [tokens(5 * sizes.block // 2, seed) for seed in range(PROMPTS)]

    async def run() -> tuple[list, list[int]]:
        url = f"{served.urls[0]}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none", timeout=ANSWER_SECONDS) as http:

            async def ask_all() -> list[tuple[list[int], int]]:
                return await asyncio.gather(*(ask(http, prompt, count) for prompt in prompts))

            before, again = await ask_all(), await ask_all()
            flying = asyncio.ensure_future(ask_all())
            await asyncio.sleep(0.1)
            assert not flying.done()
            await update_weights(served, 1)
            during = await flying
            await ask(http, prompts[0], 1)
            lone = [(await ask(http, prompts[0], 1))[1]]
            await update_weights(served, 2)
            lone += [(await ask(http, prompts[0], 1))[1] for _ in range(2)]
            return [before, again, during], lone

    runs, lone = asyncio.run(run())
    (before, _), (again, cached), (during, _) = (zip(*run, strict=True) for run in runs)
    right = [recomputed(*pair) for pair in zip(prompts, before, strict=True)]
    repeated = agreement([*before, *before], [*again, *during])
    (attention,) = re.findall("^attention: (.*)$", served.log, re.MULTILINE)
    figures(
        f"server, {mode}",
        attention=attention,
        repeated_tokens=repeated,
        right_tokens=agreement(before, right),
    )
    assert min(repeated, agreement(before, right)) >= sizes.agreement
    assert 0 in cached  # evicted
    assert lone == [2 * sizes.block, 0, 2 * sizes.block]
    assert served.process.poll() is None
    assert "Traceback" not in served.log


def holders(served: Served, name: str) -> set[int]:
    """Processes of the server that have a file open whose name matches."""
    found = set()
    for process in served.processes():
        with suppress(OSError), os.scandir(f"/proc/{process.pid}/fd") as entries:
            if any(re.fullmatch(name, os.readlink(entry.path)) for entry in entries):
                found.add(process.pid)
    return found


def test_only_the_process_with_the_engine_holds_the_gpu(servers, device, figures):
    """Front ends and the coordinator must not, nor what they are forked from."""
    served = servers["persist"]
    everybody = [process.pid for process in served.processes()]
    assert len(everybody) >= 4  # launcher, engine, coordinator, front end
    assert holders(served, re.escape(str(served.folder / "log"))) == set(everybody)
    found = holders(served, r"/dev/nvidia\d+")  # whoever uses a GPU has it open
    if device == "cpu":
        assert found == set()
        pytest.skip("no GPU: nobody could hold it")
    figures("GPU memory", processes=len(found))
    assert found == {everybody[1]}
