"""The main promise, on real engines: a session returns to the replica that holds its history."""

import json
import re
from statistics import median

import pytest
from conversations import BLOCK_SIZE, SESSIONS, TURNS
from greed import p99
from listening import beyond_loopback


def test_at_least_90_percent_of_what_one_infinite_cache_would_skip(affinity):
    run, _, _ = affinity
    assert run.share >= 0.9


def test_routing_by_load_alone_falls_clearly_short(affinity, load_balanced):
    assert load_balanced[0].share <= affinity[0].share - 0.15


def test_greedy_answers_equal_those_of_one_engine_without_prefix_caching(
    affinity, load_balanced, reference
):
    assert len(reference[0].answers) == SESSIONS * TURNS
    assert reference[0].cached_tokens == 0
    assert affinity[0].answers == reference[0].answers
    assert load_balanced[0].answers == reference[0].answers


def test_both_replicas_get_sessions(affinity):
    ranks = [record["rank_index"] for record in affinity[1].schedule["records"]]
    assert set(ranks) == {0, 1}


def test_predicted_and_real_skip_agree_within_a_block_for_every_request(affinity):
    records = affinity[1].schedule["records"]
    assert len(records) == SESSIONS * TURNS + 5
    wrong = [r for r in records if abs(r["predicted_tokens"] - r["cached_tokens"]) > BLOCK_SIZE]
    assert wrong == []
    assert sum(record["cached_tokens"] for record in records) > 0


def test_added_delay_keeps_the_promise_too(added_delay, reference):
    run, served = added_delay
    assert run.answers == reference[0].answers
    assert run.share >= 0.9
    records = served.schedule["records"]
    assert {record["rank_index"] for record in records} == {0, 1}
    assert all(r["predicted_tokens"] == r["cached_tokens"] for r in records if not r["in_window"])
    assert "longest_prefix weighed by added_delay" in served.log


def test_ctrl_c_ends_every_process_soon_and_without_a_traceback(affinity):
    _, served, code = affinity
    assert code == 130
    assert served.survivors == []
    assert served.stop_seconds is not None
    assert served.stop_seconds < 25
    assert "Traceback" not in served.log
    assert served.log.endswith("[serve] stopped\n")


def test_start_up_says_what_it_waits_for_and_prints_a_curl_line_that_works(affinity):
    log = affinity[1].log
    assert "ranks_registered registered=1 expected=2" in log
    assert "ranks_registered registered=2 expected=2" in log
    assert "front ends" in log
    assert "longest_prefix weighed by relative_load_weighted" in log
    assert re.search(r"curl http://127\.0\.0\.1:\d+/v1/completions", log)


def test_front_ends_on_all_ranks_have_a_port_each(load_balanced):
    urls = load_balanced[1].urls
    assert len(urls) == 2
    assert len(set(urls)) == 2


def test_small_requests_do_not_wait_for_greedy_ones(load_balanced):
    """Both are timed in turns on one server, and a floor allows for other work on the machine.

    What a front end read and refused itself took it half a minute each before it had limits.
    """
    waits = load_balanced[2]
    print("\ngreed", json.dumps(waits.summary()))
    assert {status for _, status in waits.greedy} <= {0, 200, 400, 413}
    assert waits.greedy["choices", 400] > 0
    usual = median(waits.quiet)
    assert median(waits.beside) < 3 * usual
    assert p99(waits.beside) < max(2 * p99(waits.quiet), 20 * usual)


def test_without_prefix_caching_routing_is_by_load(reference):
    served = reference[1]
    assert served.schedule["policy"] == "load_balanced"
    assert "ready: 1 replica, load_balanced" in served.log


def test_two_replicas_of_two_ranks_give_the_answers_of_one_rank(tensor_parallel, reference):
    assert tensor_parallel[0].answers == reference[0].answers
    assert tensor_parallel[0].share >= 0.9


@pytest.mark.parametrize("server", ["affinity", "load_balanced", "tensor_parallel"])
def test_nothing_listens_beyond_loopback(server, request):
    served = request.getfixturevalue(server)[1]
    assert beyond_loopback(served.listening) == []
