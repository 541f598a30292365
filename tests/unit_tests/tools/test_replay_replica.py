"""tools/replay: the steps of a modelled replica."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from replay.profiles import PROFILES
from replay.replica import Replica
from replay.workload import Request, block_names

PROFILE = replace(PROFILES["strict"], cache_tokens=100_000)
A, P, D, C = PROFILE.step, PROFILE.prefill, PROFILE.decode, PROFILE.context


def request(tokens, output=1, name=0, arrival=0.0, shared=0):
    """A request; of one name, the shorter is a prefix of the longer."""
    own = block_names(np.arange(shared, tokens // 16), name + 1)
    hashes = block_names(np.arange(shared), 0) + own
    return Request(0, 0, str(name), tokens, output, hashes, hashes, arrival)


def run(replica, requests):
    """Let a replica run by itself; returns how often its steps were planned."""
    todo = sorted(requests, key=lambda r: r.arrival)
    planned = 0
    while todo or replica.ends is not None:
        if todo and (replica.ends is None or todo[0].arrival <= replica.ends):
            replica.add(todo[0], todo.pop(0).arrival)
        else:
            now = replica.ends
            replica.finish_steps(now)
            replica.begin(now)
        planned += 1
        replica.cache.check_integrity()
    return planned


def test_one_request_takes_a_step_of_prefill_and_steps_that_decode():
    one = request(1000, output=11)
    run(Replica(PROFILE), [one])
    assert one.first_token == pytest.approx(A + 1000 * P)
    decode = sum(A + D + C * (1001 + n) for n in range(10))
    assert one.finished - one.first_token == pytest.approx(decode)


def test_a_long_prompt_comes_in_chunks_and_leaves_what_is_left_of_a_step_to_the_next():
    replica = Replica(PROFILE)
    first, second = request(10_000, name=1), request(1000, name=2)
    run(replica, [first, second])
    assert first.first_token == pytest.approx(2 * A + (8192 + 1808 + 1000) * P)
    assert second.first_token == first.first_token
    assert replica.prefilled == 11_000


def test_a_request_that_comes_while_others_decode_waits_for_the_present_step_only():
    slow = request(1000, output=1000)
    run(Replica(PROFILE), [slow])
    step = A + D + C * 1001
    replica = Replica(PROFILE)
    again, late = (
        request(1000, output=1000),
        request(160, name=2, arrival=A + 1000 * P + 2.5 * step),
    )
    run(replica, [again, late])
    assert late.scheduled == pytest.approx(A + 1000 * P + 3 * step, abs=1e-5)
    assert late.first_token == pytest.approx(late.scheduled + A + 160 * P + D + C * 1004)
    assert again.finished == pytest.approx(slow.finished + 160 * P, abs=1e-5)


def test_steps_in_closed_form_are_those_one_by_one():
    def requests():
        draw = np.random.default_rng(3)
        return [
            request(int(draw.integers(100, 3000)), int(draw.integers(1, 300)), n, float(at))
            for n, at in enumerate(np.sort(draw.uniform(0, 8, 40)))
        ]

    fast = requests()
    few = run(Replica(PROFILE), fast)
    slow = requests()
    replica = Replica(PROFILE)
    begin = replica.begin

    def one_step(now):
        begin(now)
        if replica.ends is not None and replica._steps > 1:
            replica._steps = 1
            replica.ends = now + replica._seconds(1)

    replica.begin = one_step
    many = run(replica, slow)
    assert many > 4 * few
    for one, other in zip(fast, slow, strict=True):
        assert one.finished == pytest.approx(other.finished, abs=1e-6)
        assert one.first_token == pytest.approx(other.first_token, abs=1e-6)


def test_cached_blocks_are_skipped_but_two_tokens_are_always_computed():
    replica = Replica(PROFILE)
    first, same, longer = (request(n, arrival=t) for n, t in [(320, 0), (320, 1), (500, 2)])
    run(replica, [first, same, longer])
    assert [r.cached_tokens for r in (first, same, longer)] == [0, 304, 320]
    assert replica.prefilled == 320 + 16 + 180
    assert replica.queued == 0


def test_an_equal_prompt_waits_for_the_step_that_computes_it_and_then_finds_it():
    first, twin = request(320), request(320)
    run(Replica(PROFILE), [first, twin])
    other, late = request(320), request(320)
    replica = Replica(PROFILE)
    replica.add(request(64, name=5), 0.0)
    run(replica, [other, late])
    assert (other.cached_tokens, late.cached_tokens) == (0, 304)
    assert late.first_token > other.first_token


def test_a_request_waits_until_there_is_room_for_it():
    replica = Replica(replace(PROFILE, cache_tokens=1600))
    first, second = request(800, output=100, name=1), request(800, output=100, name=2, arrival=0.01)
    run(replica, [first, second])
    assert second.scheduled == pytest.approx(first.finished)
    loose = Replica(replace(PROFILES["reference"], cache_tokens=1600))
    first, second = request(800, output=100, name=1), request(800, output=100, name=2, arrival=0.01)
    run(loose, [first, second])
    assert second.scheduled < first.finished


def test_no_more_requests_run_at_once_than_may():
    replica = Replica(replace(PROFILE, max_requests=2))
    requests = [request(160, output=50, name=n) for n in range(3)]
    run(replica, requests)
    assert requests[2].scheduled == pytest.approx(min(r.finished for r in requests[:2]))


def test_generated_blocks_are_kept_if_asked():
    for generated, cached in ((False, 320), (True, 480)):
        replica = Replica(PROFILE, generated=generated)
        whole = block_names(np.arange(40), 1)
        first = Request(0, 0, "a", 320, 160, whole[: 20 * 8], whole, 0.0)
        then = Request(0, 1, "a", 600, 1, whole[: 37 * 8], whole, 9.0)
        run(replica, [first, then])
        assert then.cached_tokens == cached
