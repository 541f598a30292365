"""tools/bench_coordinator.py: its statistics and targets, and that both sides are really driven."""

import gc
import json
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest
import zmq

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

import bench_coordinator as tool
from coordinator_bench import bursts, data_plane, frames, memory, plane_dialects, plots, prompts
from coordinator_bench.decision import DecisionSide, Shape
from coordinator_bench.hashes import Hashing
from coordinator_bench.options import Options, quick
from coordinator_bench.ours import Ours
from coordinator_bench.plane_engines import Cache, PlaneConversation
from coordinator_bench.plane_keys import Keys
from coordinator_bench.plane_load import Generator, Load
from coordinator_bench.plane_processes import running
from coordinator_bench.released import Released
from coordinator_bench.replies import ReplySide
from coordinator_bench.rows import AGAINST_BASE, FASTER, OF_LIMIT, Row, Target, table, write_json
from coordinator_bench.stalls import Stalls, Watched
from coordinator_bench.traffic import CLIENT, Placement, Traffic, engine, make_side
from coordinator_bench.workers import WorkerFailed, alternate, workers
from megatron.core.inference.data_parallel_inference_coordinator import (
    DataParallelInferenceCoordinator,
)

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.hashing import block_hashes
from megatron.core.inference.coordinator.policies import PrefixCachingCostPolicy
from megatron.core.inference.coordinator.runtime.codec import Codec

BLOCK = 4
SIDES = ("ours", "released")


@pytest.fixture(autouse=True)
def collector_as_it_was():
    thresholds, callbacks = gc.get_threshold(), list(gc.callbacks)
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    gc.callbacks[:] = callbacks


def row(**values):
    return Row("part", "variant", "us", **{"ours": [1.0], **values})


# --- rows --------------------------------------------------------------------------------------


def test_figures_are_medians_and_ratios_are_of_medians():
    measured = row(ours=[1, 2, 90], released=[8, 10, 12], limit=[1])
    assert measured.value("ours") == 2
    assert measured.value(FASTER) == 5
    assert measured.value(OF_LIMIT) == 2
    assert measured.value(AGAINST_BASE) is None


@pytest.mark.parametrize(
    ("released", "met", "fails_half"), [(12, True, False), (11, False, False), (5, False, True)]
)
def test_a_lower_bound_and_half_of_it(released, met, fails_half):
    measured = row(ours=[2], released=[released], targets=(Target(FASTER, at_least=6),))
    assert measured.met() is met
    assert measured.fails(0.5) is fails_half


@pytest.mark.parametrize(
    ("ours", "met", "fails_half"), [(13, True, False), (14, False, False), (27, False, True)]
)
def test_an_upper_bound_and_half_of_it(ours, met, fails_half):
    measured = row(ours=[ours], base=[10], targets=(Target(AGAINST_BASE, at_most=1.3),))
    assert measured.met() is met
    assert measured.fails(0.5) is fails_half


def test_absolute_targets_are_shown_and_never_fail():
    measured = row(ours=[500], targets=(Target("ours", at_most=5, absolute=True),))
    assert measured.met() is False
    assert not measured.fails(0.5)


def test_of_several_targets_every_one_must_hold():
    targets = (Target(FASTER, at_least=2), Target(OF_LIMIT, at_least=0.6))
    assert row(ours=[1], released=[3], limit=[2], targets=targets).met() is False
    assert row(ours=[1], released=[3], limit=[1], targets=targets).met() is True
    assert row(ours=[1], released=[1], limit=[1], targets=targets).met() is False
    # What was not measured is not missed.
    assert row(ours=[1], limit=[1], targets=targets).met() is True
    assert row().met() is None


def test_the_verdict_names_what_misses_half_its_target(capsys):
    good = row(released=[6], targets=(Target(FASTER, at_least=6),))
    bad = row(released=[2], targets=(Target(FASTER, at_least=6),))
    assert tool.verdict([good]) == 0
    assert tool.verdict([good, bad]) == 1
    assert "part, variant (released / ours >= 6)" in capsys.readouterr().err


def test_json_has_a_row_a_measure(tmp_path):
    measured = row(
        ours=[1, 2, 3],
        released=[20, 20, 20],
        ratios=(FASTER,),
        targets=(Target(FASTER, at_least=6),),
        details={"held": 0.5},
    )
    write_json(tmp_path / "bench.json", [measured], command=["--quick"])
    report = json.loads((tmp_path / "bench.json").read_text())
    assert report["command"] == ["--quick"]
    assert report["machine"]["megatron-core"].startswith("0.19")
    assert report["rows"] == [
        {
            "part": "part",
            "variant": "variant",
            "unit": "us",
            "ours": 2,
            "released": 20,
            "limit": None,
            "base": None,
            "ratios": {FASTER: 10},
            "target": ["released / ours >= 6"],
            "met": True,
            "rounds": {"ours": [1, 2, 3], "released": [20, 20, 20]},
            "details": {"held": 0.5},
        }
    ]


def test_the_table_says_what_is_met():
    lines = table(
        [
            row(released=[6], ratios=(FASTER,), targets=(Target(FASTER, at_least=6),)),
            row(released=[5], targets=(Target(FASTER, at_least=6),)),
        ]
    ).splitlines()
    assert lines[0].split()[3:] == ["ours", "released", "limit", "ratios", "target", "met"]
    assert "released / ours 6" in lines[1]
    assert lines[1].endswith("yes")
    assert lines[2].endswith("NO")


def test_the_plot_leaves_out_comparisons_of_ours_to_ours(tmp_path):
    rows = [
        row(released=[100.0], limit=[0.5]),
        row(base=[1.0]),
        Row("growth", "16 ranks", "us", [1.0], axis="ranks", at=16),
        Row("growth", "64 ranks", "us", [2.0], [9.0], axis="ranks", at=64),
    ]
    bars, curves = plots.panels(rows)
    assert bars == {"part, us": rows[:1]}
    assert curves == {"us a request against ranks": rows[2:]}
    plots.write_plot(tmp_path / "bench.png", rows)
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_rounds_alternate():
    order = []
    sides = {name: lambda number, name=name: order.append((number, name)) for name in "ab"}
    results = alternate(2, sides, "nothing")
    assert order == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
    assert results == {"a": [None, None], "b": [None, None]}


# --- frames and prompts ------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32])
def test_numbers_are_read_in_place(number):
    assert frames.int_at(b"??" + msgpack.packb(number) + b"!", 2) == number


@pytest.mark.parametrize("count", [0, 1, 15, 16, 65_535, 65_536])
def test_tokens_are_packed_as_msgpack_packs_them(count):
    tokens = prompts.tokens_of(1, count)
    packed = frames.array_header(count) + frames.packed_tokens(tokens)
    assert packed == msgpack.packb(tokens.tolist())


def test_chains_of_equal_sign_are_told_apart():
    a, b, gone = np.array([1, 2]), np.array([3]), np.array([-4, -5])
    told = frames.chains(a, b, gone, gone, np.empty(0, dtype=np.int64), a)
    broken = frames.BREAK
    assert told.tolist() == [1, 2, broken, 3, -4, -5, broken, -4, -5, 1, 2]


def test_our_frames_mean_to_the_codec_what_they_should():
    codec = Codec(lambda body: body)

    def decode(peer, received):
        return codec.decode(peer, received)

    assert decode(b"c", frames.connect()) == m.Connect(1, False)
    assert decode(b"e", frames.register(3, 64, 8, 100)) == m.Register(
        1, "bench", 3, 0, 8, 64, 100, "lru"
    )
    submitted = decode(b"c", frames.submit(7, 128, b"prompt", b"h" * 16))
    assert (submitted.client_request_id, submitted.prompt_tokens) == (7, 128)
    told = decode(b"e", frames.events(5, np.array([1, frames.BREAK, -2]), epoch=2))
    assert (told.weight_epoch, told.first, told.count) == (2, 5, 3)
    assert np.frombuffer(told.events, dtype="<i8").tolist() == [1, frames.BREAK, -2]
    answers = decode(b"e", frames.replies([(9, 64, 4)], [b"body"])).answers
    assert [(a.request_id, a.cached_tokens, a.event_number) for a in answers] == [(9, 64, 4)]


def test_a_conversation_is_hashed_and_packed_as_its_tokens():
    conversation = prompts.Conversation(1, 4, BLOCK, system_blocks=1)
    tokens = prompts.tokens_of(1, 4 * BLOCK, BLOCK).tolist()
    assert conversation.hashes.tolist() == list(block_hashes(tokens, BLOCK))
    assert msgpack.unpackb(conversation.body(2)) == tokens[: 2 * BLOCK]
    assert conversation.hashes[:1].tolist() == prompts.system_hashes(1, BLOCK).tolist()
    other = prompts.Conversation(2, 4, BLOCK, system_blocks=1)
    assert (conversation.hashes == other.hashes).tolist() == [True, False, False, False]


# --- both coordinators -------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIDES)
def test_conversations_stay_where_they_are_held(name):
    side = make_side(name, 4, BLOCK)
    traffic = Traffic(side)
    conversations = [prompts.Conversation(n, 8, BLOCK) for n in range(4)]
    first = traffic.turn(conversations, 4)
    assert (first.requests, first.stored) == (4, 16)
    assert first.submit > 0
    assert first.reply > 0
    second = traffic.turn(conversations, 8)
    assert second.stored == 16  # the other half of each: nothing was computed again
    assert all(list(c.held.values()) == [8] for c in conversations)


@pytest.mark.parametrize("name", SIDES)
def test_what_a_rank_holds_draws_a_request(name):
    for rank in range(4):
        side = make_side(name, 4, BLOCK)
        conversation = prompts.Conversation(rank, 8, BLOCK)
        side.hold(rank, [conversation.hashes[:6]])
        (placed,) = Traffic(side).submit([conversation], 8)
        assert placed.rank == rank


@pytest.mark.parametrize("name", SIDES)
def test_an_answer_reaches_the_client_that_asked(name):
    side = make_side(name, 2, BLOCK)
    conversation = prompts.Conversation(1, 2, BLOCK)
    sent = side.deliver(CLIENT, side.submission(77, conversation, 2))
    placed = side.placement(sent)
    ((peer, answer),) = side.deliver(*side.replies(placed.rank, [placed.request_id]))
    assert peer == CLIENT
    assert frames.int_at(answer[0], 2) == 77
    # It is in flight no more: both ranks are free.
    assert {p.rank for p in Traffic(side).submit_short(2)} == {0, 1}


@pytest.mark.parametrize("name", SIDES)
def test_short_requests_are_spread_evenly(name):
    traffic = Traffic(make_side(name, 4, BLOCK))
    assert Counter(p.rank for p in traffic.submit_short(12)) == {0: 3, 1: 3, 2: 3, 3: 3}


def test_engines_that_do_not_tell_are_known_by_history():
    side = Ours(2, BLOCK, events=False)
    traffic = Traffic(side)
    conversation = prompts.Conversation(1, 4, BLOCK)
    times = traffic.turn([conversation], 4)
    assert (times.events == 0 or times.events < times.submit, times.stored) == (True, 4)
    assert side.news(0, [conversation.hashes]) == []
    assert traffic.turn([conversation], 4).stored == 0


def test_a_gap_in_the_events_is_no_silent_loss():
    side = Ours(1, BLOCK)
    side.batch(0, np.array([1]))  # never delivered
    with pytest.raises(RuntimeError, match="rank 0 is not believed"):
        side.hold(0, [np.array([2])])


def test_the_released_object_has_what_its_constructor_makes():
    real = DataParallelInferenceCoordinator(
        SimpleNamespace(send=lambda _: None, close=lambda: None), 0, None, 8, hostname="127.0.0.1"
    )
    made = set(vars(Released(2, BLOCK).coordinator))
    unused = {"context", "addr", "pipe_connection", "schedule_output_path"}
    try:
        assert made == set(vars(real)) - unused
    finally:
        real.stop()


def test_the_released_one_hashes_what_ours_is_told():
    side = Released(1, BLOCK)
    conversation = prompts.Conversation(1, 3, BLOCK)
    Traffic(side).submit([conversation], 3)
    assert list(side.coordinator._hash_table) == conversation.hashes.tolist()


@pytest.mark.parametrize("name", SIDES)
@pytest.mark.parametrize("system", [0, 2])
def test_a_round_of_the_decision_part_measures_the_last_turn(name, system):
    options = Options(block=BLOCK, in_flight=3, turns=(0.5, 1.0))
    side = DecisionSide(name, Shape(8, 4, system), options)
    times = side.round(0)
    assert times.requests == 3
    assert times.stored == 3 * 4
    assert 0 < times.submit_us < times.whole_us


@pytest.mark.parametrize("name", SIDES)
def test_every_reply_of_a_batch_is_answered(name):
    assert ReplySide(name, BLOCK).round(20) > 0


def test_both_hash_functions_are_run_and_compared(monkeypatch):
    hashing = Hashing(300, BLOCK)
    assert all(hashing.round(side, kind) > 0 for side in SIDES for kind in ("a list", "an array"))
    wrong = "megatron.core.inference.coordinator.hashing.block_hashes"
    monkeypatch.setattr(wrong, lambda tokens, block: [1])
    with pytest.raises(ValueError, match="other hashes"):
        Hashing(300, BLOCK)


# --- memory and stalls -------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIDES)
@pytest.mark.parametrize("variant", memory.VARIANTS, ids=lambda variant: variant.fill)
def test_memory_is_divided_by_the_pairs_that_are_there(name, variant):
    filled = memory.Memory(name, BLOCK, True)
    pairs = getattr(filled, variant.fill)(2 * 16 * 128)
    assert pairs == pytest.approx(2 * 16 * 128, rel=0.15)
    if name == "released":
        table = filled._side.coordinator._hash_table
        assert sum(map(len, table.values())) == pairs


def test_history_holds_the_system_prompt_everywhere_too():
    filled = memory.Memory("ours", BLOCK, False)
    assert filled.system(1000) == 1000 // 112 * 112 + 16 * 16


class BusySide:
    """Takes as long as it is told."""

    backlog = 2

    def deliver(self, peer, milliseconds):
        end = time.thread_time() + milliseconds / 1000
        while time.thread_time() < end:
            pass

    def tick(self):
        self.deliver(b"", 1)

    def answer_pings(self, sent):
        assert sent is None

    def sweep(self):
        self.backlog -= 1
        self.deliver(b"", 40)


def test_the_longest_call_and_the_longest_collection_are_found():
    watched = Watched(BusySide())
    watched.deliver(b"", 20)
    watched.tick()
    watched.leisure = False
    watched.idle()
    assert watched.longest / 1e6 == pytest.approx(20, rel=0.5)
    watched.leisure = True
    watched.idle()
    assert watched.longest / 1e6 == pytest.approx(40, rel=0.5)
    assert watched.backlog == 0
    gc.collect()
    assert watched.pause > 0


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("removed", ()),
        ("epoch", ()),
        ("expired", ()),
        ("events", (100, "stored")),
        ("events", (100, "removed")),
        ("events", (10**6, "table")),
    ],
)
def test_every_upheaval_is_watched_to_its_end(monkeypatch, method, arguments):
    monkeypatch.setattr("coordinator_bench.stalls.EVENTS", 1280)
    monkeypatch.setattr("coordinator_bench.stalls._STEPS", 2)
    call, pause = getattr(Stalls("ours", BLOCK, 1280), method)(*arguments)
    assert call > 0
    assert pause >= 0


def test_a_released_rank_is_removed():
    stalls = Stalls("released", BLOCK, 1280)
    call, _ = stalls.removed()
    assert call > 0
    assert not stalls._side.coordinator._hash_table
    assert engine(0) not in stalls._side.coordinator.identity_to_rank_index


# --- bursts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIDES)
@pytest.mark.parametrize("load", bursts.LOADS, ids=lambda load: load.name)
def test_the_base_load_is_what_it_says(name, load):
    traffic = Traffic(make_side(name, bursts.RANKS, BLOCK))
    kept = bursts._base_load(traffic, load)
    first = load.base * (2 if load.doubled else 1)
    expected = {0: first, **dict.fromkeys(range(1, bursts.RANKS), load.base)}
    assert kept == Counter(expected)
    # The coordinator counts the same: whoever has least gets what comes.
    more = Counter(p.rank for p in traffic.submit_short(first * 8 - sum(expected.values())))
    assert kept + more == Counter(dict.fromkeys(range(8), first))


def test_a_burst_is_judged_by_where_its_requests_went():
    a, b = (prompts.Conversation(n, bursts._BLOCKS, 1, bursts._SHARED) for n in (1, 2))
    placed = [Placement(rank, n) for n, rank in enumerate([0, 0, 0, 1])]
    judged = bursts._judged([a, a, b, b], placed, Counter({1: 2}))
    assert judged == {
        "spread": 3 * bursts.RANKS / 4,
        "load spread": 3 * bursts.RANKS / 6,
        "skipped": (0 + 128 + 112 + 0) / (4 * 128),
        "hits": 0.5,
        "cold": 2 / bursts.GROUPS,
        "own parts": 3 / bursts.GROUPS,
    }


def test_the_released_coordinator_puts_a_whole_burst_on_one_rank():
    judged = bursts.Bursts("released", "", BLOCK).round(bursts.Load(0), 0)
    assert judged["spread"] == bursts.RANKS
    assert judged["hits"] == pytest.approx(399 / 400)


def test_the_default_policy_comes_first():
    first, *others = bursts.Bursts("ours", "", BLOCK).policies()
    assert first == "relative_load_weighted"
    assert len(others) == len(PrefixCachingCostPolicy) - 1


# --- the data plane ----------------------------------------------------------------------------


def test_a_cache_tells_exactly_what_it_holds():
    rng = np.random.default_rng(0)
    cache = Cache(40)
    conversations = [PlaneConversation(rng, 20, BLOCK) for _ in range(5)]
    table: set[int] = set()
    known = 0
    for _ in range(200):
        conversation = conversations[rng.integers(5)]
        cache.serve(conversation, int(rng.integers(1, 21)))
        first, told = cache.news()
        assert first == known
        known += len(told)
        for event in told.tolist():
            if event == 0:
                table.clear()
            elif event > 0:
                assert event not in table
                table.add(event)
            elif event != frames.BREAK:
                table.remove(-event)
        held = {h for c, depth in cache._held.items() for h in c.hashes[:depth].tolist()}
        assert table == held
        assert len(held) <= 40
    assert first > 0


def test_prompts_have_the_stated_length_on_average():
    for tokens in (1024, 4096, 32768, 131072):
        lengths = Load(tokens, 64, 16, 256).lengths()
        assert sum(lengths) * 64 == len(lengths) * tokens
        assert lengths[0] * 4 == tokens // 64 * 3


def test_the_released_request_is_a_list_of_tokens_with_its_slot_at_the_end():
    body = frames.array_header(8) + frames.packed_tokens(prompts.tokens_of(5, 8))
    conversation = PlaneConversation(np.random.default_rng(1), 2, BLOCK)
    dialect = plane_dialects.ReleasedDialect(BLOCK, b"")
    (frame,) = dialect.request(300, 8, body, conversation.mark, b"")
    header, slot, tokens, sampling = msgpack.unpackb(frame)
    assert (header, slot, len(tokens)) == (20, 300, 8)
    assert all(256 <= token < 65536 for token in tokens)
    assert tokens[BLOCK:] == prompts.tokens_of(5, 8).tolist()[BLOCK:]
    assert sampling["slot"] == (300).to_bytes(8, "big")
    # The coordinator packs it anew, and the slot must still be at the end.
    assert msgpack.packb([1, tokens, sampling], use_bin_type=True).endswith(sampling["slot"])


def test_requests_go_through_every_process_and_back():
    options = Options(
        rounds=1, plane_tokens=(1024,), plane_released=(1024,), plane_in_flight=32,
        plane_seconds=0.05,
    )  # fmt: skip
    found = data_plane._one_length(1024, options)
    assert list(found) == ["ours", "released", "limit"]
    for (measured,) in found.values():
        assert measured.requests >= 32
        assert measured.rate > 0
        assert measured.process_us >= measured.loop_us > 0
    assert found["ours"][0].held > 0.4  # conversations found their engines
    rows = data_plane._rows("1,024 tokens", 1024, found) + data_plane._growth_with_length(
        {1024: found}
    )
    assert [r.unit for r in rows] == ["requests/s", "us", "us", "us", "us"]
    assert rows[3].value(AGAINST_BASE) == 1


@pytest.mark.parametrize("name", ["ours", "limit"])
def test_connections_are_encrypted_where_they_should_be(name):
    keys, load = Keys.generate(), Load(1024, BLOCK, 2, 8)
    with running(name, load.ranks, load.block, keys) as target:
        plain = _socket_to(target.address)
        plain.send_multipart(plane_dialects.DIALECTS[name](BLOCK, b"").client_hello())
        with workers(load=(Generator, name, target.address, target.pid, load, keys)) as made:
            target.wait()
            made["load"].call("connect")
            assert made["load"].call("round", 0.05).requests >= 8
        assert not plain.poll(0), "it answers a peer that speaks in plain"
        plain.close(linger=0)


def _socket_to(address: str) -> zmq.Socket:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(address)
    return socket


# --- the tool ----------------------------------------------------------------------------------


def test_a_failing_worker_says_why():
    with pytest.raises(WorkerFailed, match="no part 'x'"), workers(bad=(tool._parts, "x")):
        pass


def test_parts_are_chosen_by_name(monkeypatch, capsys, tmp_path):
    asked = []

    def measure(part, options):
        asked.append((part, options))
        return [row(released=[1.0], targets=(Target(FASTER, at_least=6),))]

    monkeypatch.setattr(tool, "measure", measure)
    report = tmp_path / "bench.json"
    assert tool.main(["--parts", "bursts,hashing", "--rounds", "7", "--json", str(report)]) == 0
    assert asked == [(part, Options(rounds=7)) for part in ("bursts", "hashing")]
    assert len(json.loads(report.read_text())["rows"]) == 2
    asked.clear()
    assert tool.main(["--quick", "--block-size", "16"]) == 1  # 1 is less than half of 6
    assert [part for part, _ in asked] == [p for p in tool.PARTS if p not in tool.NOT_QUICK]
    assert asked[0][1] == quick(16, 3)
    with pytest.raises(SystemExit):
        tool.main(["--parts", "nothing"])
    assert "no part 'nothing'; there are decision" in capsys.readouterr().err


def test_every_part_is_a_module_that_measures():
    for module in tool.PARTS.values():
        assert callable(__import__(f"coordinator_bench.{module}", fromlist=["measure"]).measure)


def test_help_explains_every_part_and_column(capsys):
    with pytest.raises(SystemExit):
        tool.main(["--help"])
    text = capsys.readouterr().out
    assert all(f"\n  {part} " in text for part in tool.PARTS)
