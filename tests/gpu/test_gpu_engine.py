"""The engine on the device: steps and sessions beside released, long prompts, async, resets."""

import asyncio
import time
from statistics import median

import pytest
from engines import (
    ANSWER_SECONDS,
    agreement,
    answers,
    decode_ms,
    longest_ms,
    room,
    serving,
    submit,
    tokens,
    watch,
)
from megatron.core.inference.config import AsyncScheduleMode

NAMES = RELEASED, OURS = "released", "ours"


# --- beside the released coordinator -------------------------------------------------------------


async def decode(client, steps, sizes) -> dict[int, tuple[float, list[list[int]]]]:
    """The median decode step in ms, and the answers, by how many decode at once."""
    found = {}
    for batch in sizes.batches:
        prompts = [tokens(sizes.block // 2, seed) for seed in range(batch)]
        await answers(client, prompts[:1], 2)  # first steps are slow
        steps.clear()
        told = await answers(client, prompts, sizes.steps)
        found[batch] = decode_ms(steps), told
    return found


async def converse(client, engine, sizes) -> dict:
    """Sessions at once: answers in order, seconds to the first tokens, the share skipped.

    What a turn adds does not depend on what was answered, so all runs send the same prompts.
    """
    before = engine._prefill_tokens_computed, engine._prefill_tokens_skipped

    async def session(number: int) -> list[tuple[list[int], float]]:
        turns = []
        for turn in range(sizes.turns):
            sent = time.time()  # the engine stamps with this clock
            prompt = tokens(sizes.first + turn * sizes.added, 100 + number)
            reply = await asyncio.wait_for(submit(client, prompt, 8), ANSWER_SECONDS)
            assert reply["status"] == "COMPLETED"
            (taken,) = [e["timestamp"] for e in reply["events"] if e["type"] == "ADD_ENGINE"]
            turns.append((list(reply["generated_tokens"]), taken - sent + reply["ttft"]))
        return turns

    held = await asyncio.gather(*map(session, range(sizes.sessions)))
    computed = engine._prefill_tokens_computed - before[0]
    skipped = engine._prefill_tokens_skipped - before[1]
    return {
        "answers": [answer for turns in held for answer, _ in turns],
        "ttft_ms": median(seconds for turns in held for _, seconds in turns) * 1e3,
        "skip_rate": skipped / (computed + skipped),
    }


@pytest.fixture(scope="module")
def both(make_engine, sizes) -> dict[str, dict]:
    """The same on an engine under our coordinator, then on one under the released one."""

    async def run(name: str) -> dict:
        engine = make_engine(
            max_requests=max(sizes.batches),
            max_sequence_length=4096,
            buffer_size_gb=room((max(sizes.batches) + 120) * sizes.block),
        )
        async with serving(engine, name == OURS) as client:
            steps = watch(engine)
            return {
                "decode": await decode(client, steps, sizes),
                "sessions": await converse(client, engine, sizes),
            }

    return {name: asyncio.run(run(name)) for name in (OURS, RELEASED)}


def test_decode_steps_take_no_longer_than_with_the_released_one(both, sizes, figures):
    for batch in sizes.batches:
        (released, theirs), (ours, answered) = (both[name]["decode"][batch] for name in NAMES)
        figures(
            f"decode, batch {batch}",
            released_ms=released,
            ours_ms=ours,
            ratio=ours / released,
            equal_tokens=agreement(answered, theirs),
        )
        assert agreement(answered, theirs) >= sizes.agreement
        assert ours / released < sizes.ratio


def test_sessions_are_answered_as_by_the_released_one_and_skip_as_much(both, sizes, figures):
    released, ours = (both[name]["sessions"] for name in NAMES)
    equal = agreement(ours["answers"], released["answers"])
    figures("sessions", equal_tokens=equal, ttft_ratio=ours["ttft_ms"] / released["ttft_ms"])
    for name, run in zip(NAMES, (released, ours), strict=True):
        figures("sessions", **{f"{name}_{key}": run[key] for key in ("ttft_ms", "skip_rate")})
    assert equal >= sizes.agreement
    assert len(set(map(tuple, ours["answers"]))) > sizes.sessions
    assert ours["skip_rate"] == released["skip_rate"] > 0


# --- long prompts --------------------------------------------------------------------------------


def test_decode_goes_on_while_long_prompts_arrive(make_engine, sizes, figures):
    """One of them fills a step, and in each step those that decode get a token."""
    count = 3 * sizes.long + 20

    async def run() -> tuple[list, list]:
        engine = make_engine(
            max_requests=sizes.long + 16,
            max_sequence_length=sizes.long_tokens + 2 * sizes.block,
            buffer_size_gb=room(20 * sizes.long_tokens),
        )
        async with serving(engine) as client:
            steps = watch(engine)
            prompts = [tokens(sizes.long_tokens, seed) for seed in range(sizes.long)]
            prepared = [client.prepare(prompt) for prompt in prompts]  # as front ends do
            short = [tokens(20, seed) for seed in (1, 2)]
            decoding = asyncio.ensure_future(answers(client, short, count))
            while len(steps) < 10:
                await asyncio.sleep(0.001)
            quiet = steps[:]
            await answers(client, prepared, 2)
            assert not decoding.done()
            busy = steps[len(quiet) - 1 :]
            await decoding
        return quiet, busy

    quiet, busy = asyncio.run(run())
    usual, (longest, between) = decode_ms(quiet), longest_ms(busy)
    figures(
        f"{sizes.long} prompts of {sizes.long_tokens}",
        steps_meanwhile=len(busy) - 1,
        usual_ms=usual,
        longest_gap_ms=longest,
        longest_gap_over_usual=longest / usual,
        longest_between_steps_ms=between,
        longest_between_steps_over_usual=between / usual,
    )
    assert len(busy) > 2


# --- async scheduling, preemption, resets --------------------------------------------------------


@pytest.mark.parametrize("generated", [False, True])
@pytest.mark.parametrize("scheduling", ["legacy", "async"])
def test_answers_are_right_after_preemption(
    scheduling, generated, make_engine, recomputed, sizes, figures
):
    """Too many requests for the buffer, then one at a time on a full one, then a next turn."""
    block, count = sizes.block, sizes.block * 5 // 4
    prompts = [tokens(block * 5 // 2, seed) for seed in range(11)]

    async def run() -> tuple[list[list[int]], list[int], dict]:
        engine = make_engine(
            max_requests=8,
            max_sequence_length=8 * block,
            buffer_size_gb=room(18 * block),
            async_sched_mode=AsyncScheduleMode(scheduling),
        )
        async with serving(engine, generated_tokens=generated) as client:
            told = await answers(client, prompts[:8], count)
            assert engine.evicted_request_count > 0  # of those that ran
            for prompt in prompts[8:]:
                told += await answers(client, [prompt], count)
            longer = prompts[-1] + told[-1] + tokens(block, 99)
            reply = await asyncio.wait_for(submit(client, longer, 8), ANSWER_SECONDS)
            return told, longer, reply

    told, longer, reply = asyncio.run(run())
    told.append(list(reply["generated_tokens"]))
    asked = zip([*prompts, longer], told, strict=True)
    equal = agreement(told, [recomputed(*pair) for pair in asked])
    what = "generated tokens kept" if generated else "prompts kept"
    figures(f"{scheduling}, {what}", equal_tokens=equal)
    assert equal >= sizes.agreement
    assert reply["num_cached_tokens"] == (3 if generated else 2) * block


@pytest.mark.parametrize("scheduling", ["legacy", "async"])
def test_a_reset_in_flight_is_answered_and_the_engine_goes_on(
    scheduling, make_engine, recomputed, sizes
):
    prompts = [tokens(3 * sizes.block, seed) for seed in range(3)]

    async def run() -> tuple[list[dict], list[int]]:
        engine = make_engine(
            max_requests=8,
            max_sequence_length=32 * sizes.block,
            buffer_size_gb=room(100 * sizes.block),
            async_sched_mode=AsyncScheduleMode(scheduling),
        )
        async with serving(engine) as client:
            steps = watch(engine)
            flying = [submit(client, prompt, 20 * sizes.block) for prompt in prompts]
            while len(steps) < 5:
                await asyncio.sleep(0.001)
            engine.reset()
            lost = await asyncio.wait_for(asyncio.gather(*flying), ANSWER_SECONDS)
            (after,) = await answers(client, prompts[:1], 8)
            return lost, after

    lost, after = asyncio.run(run())
    assert [reply["status"] for reply in lost] == ["FAILED"] * 3
    assert "the engine was reset" in str(lost[0]["events"])
    assert agreement([after], [recomputed(prompts[0], after)]) >= sizes.agreement
