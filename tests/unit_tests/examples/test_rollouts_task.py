"""The pure parts of examples/rl_rollouts: the task, recorded sessions, figures."""

import gzip
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "rl_rollouts"
RECORDED = ROOT.parent / "shared" / "workloads" / "tau_airline_gpt4o" / "messages.jsonl.gz"


def _load(name: str) -> ModuleType:
    """A module of the example, under a name that nobody else uses."""
    unique = f"rl_rollouts_{name}"
    spec = importlib.util.spec_from_file_location(unique, FOLDER / f"{name}.py")
    module = sys.modules[unique] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


task, sessions, figures = _load("task"), _load("sessions"), _load("figures")


# --- The look-up task ---

BOOK = task.Book({"Heron": ("north", 10), "Osprey": ("coal", 20)}, {"north": 3, "coal": 2})


@pytest.fixture
def episode():
    return task.group_of_attempts(0, size=1, turns=6, book=BOOK, seed=1)[0]


def test_who_looks_everything_up_and_adds_gets_the_reward(episode):
    moves = [("ships", "Heron"), ("ships", "Osprey"), ("quays", "north"), ("quays", "coal")]
    for table, name in moves:
        episode.take(json.dumps({"table": table, "name": name}))
    replies = [json.loads(m["content"]) for m in episode.messages if m["role"] == "tool"]
    assert replies == [
        {"quay": "north", "length": 10},
        {"quay": "coal", "length": 20},
        {"price": 3},
        {"price": 2},
    ]
    assert not episode.done
    episode.take('{"answer": 70}')
    assert episode.done
    assert episode.reward == 1


@pytest.mark.parametrize("answer", ['{"answer": 71}', '{"answer": "70"}', '{"answer": null}'])
def test_a_wrong_answer_ends_without_reward(episode, answer):
    episode.take(answer)
    assert episode.done
    assert episode.reward == 0


@pytest.mark.parametrize(
    "nonsense",
    [
        "",
        "\ufffd\x00",
        "[]",
        "7",
        '{"table": ["ships"], "name": {}}',
        '{"table": "ships"}',
        "[" * 9999,
    ],
)
def test_nonsense_costs_a_turn_and_the_reply_says_so(episode, nonsense):
    episode.take(nonsense)
    assert not episode.done
    assert episode.messages[-2] == {"role": "assistant", "content": nonsense}
    reply = json.loads(episode.messages[-1]["content"])
    assert reply["turns_left"] == 5
    assert "error" in reply


def test_turns_run_out(episode):
    for _ in range(6):
        assert not episode.done
        episode.take("?")
    assert episode.done
    assert episode.reward == 0


def test_a_group_shares_its_system_prompt_and_question_and_no_more():
    book = task.Book.written(7)
    first, second = task.group_of_attempts(3, size=2, turns=4, book=book, seed=1)
    assert first.messages[0] == second.messages[0]
    assert first.messages[1] != second.messages[1]
    assert first.ships == second.ships
    again = task.group_of_attempts(3, size=2, turns=4, book=task.Book.written(7), seed=1)
    assert [each.messages for each in again] == [first.messages, second.messages]
    (other,) = task.group_of_attempts(4, size=1, turns=4, book=book, seed=1)
    assert other.messages[0] == first.messages[0]
    assert other.ships != first.ships


def test_the_system_prompt_is_long_and_complete():
    system = task.group_of_attempts(0, 1, 4, task.Book.written(7), 1)[0].messages[0]["content"]
    assert 1000 < len(system.encode()) < 3000
    assert "You have 4 turns" in system
    assert "{turns}" not in system
    assert "Heron" in system
    assert "coal" in system


# --- Recorded sessions ---

SESSION = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Book it"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "book"}}]},
    {"role": "tool", "content": "done"},
    {"role": "assistant", "content": "Booked."},
]


def _episode(turns: int = 9, longest: int = 99):
    fits = lambda messages: len(messages) <= longest  # noqa: E731
    (episode,) = sessions.recorded_group(0, [SESSION], turns, fits)
    return episode


def test_a_session_is_replayed_with_the_history_that_was_recorded():
    episode, histories = _episode(), []
    while not episode.done:
        histories.append(list(episode.messages))
        episode.take("nonsense")
    assert histories == [SESSION[:2], SESSION[:4], SESSION[:6]]
    assert episode.reward == 0


def test_the_reward_is_how_far_answers_agree_with_the_record():
    episode = _episode(turns=2)
    episode.take("Help")
    assert not episode.done
    episode.take(json.dumps(SESSION[4]["tool_calls"]))
    assert episode.done
    assert episode.reward == (3 / 6 + 1) / 2


def test_a_session_ends_where_it_no_longer_fits():
    episode = _episode(longest=4)
    episode.take("")
    assert not episode.done
    episode.take("")
    assert episode.done
    assert len(episode.messages) == 4


def test_what_never_fits_is_left_out():
    assert sessions.recorded_group(0, [SESSION], 9, lambda messages: False) == []


@pytest.mark.parametrize("name", ["some.jsonl", "some.jsonl.gz"])
def test_sessions_are_read_by_group(name, tmp_path):
    path = tmp_path / name
    lines = [{"group": 5}, {"group": "x"}, {}, {"group": 5}, {}]
    text = "\n".join(json.dumps(line | {"messages": SESSION[:3]}) for line in lines) + "\n\n"
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    groups = sessions.read_sessions(path)
    assert list(groups) == [0, 1, 2, 3]
    assert [len(group) for group in groups.values()] == [2, 1, 1, 1]
    assert groups[0][1] == SESSION[:3]


@pytest.mark.parametrize("line", ["{", "[]", '{"messages": 1}', '{"messages": [{"content": ""}]}'])
def test_a_line_that_is_no_session_is_named(line, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"messages": SESSION}) + "\n" + line)
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2: "):
        sessions.read_sessions(path)


@pytest.mark.skipif(not RECORDED.exists(), reason=f"{RECORDED.parent.name} is not at hand")
def test_real_recorded_sessions_are_read():
    groups = sessions.read_sessions(RECORDED)
    assert [len(group) for group in groups.values()] == [4] * 50
    for number, group in groups.items():
        for episode in sessions.recorded_group(number, group, 99, lambda messages: True):
            answers = sum(message["role"] == "assistant" for message in episode.record)
            while not episode.done:
                episode.take("")
            assert len(episode.agreements) == answers


# --- Figures ---

RECORDS = [
    {"request_id": 2, "predicted_tokens": 64, "cached_tokens": 64, "in_window": False},
    {"request_id": 0, "predicted_tokens": 0, "cached_tokens": 64, "in_window": True},
    {"request_id": 1, "predicted_tokens": 64, "cached_tokens": 0},
]


def test_the_prediction_error_is_that_outside_the_window():
    assert figures.Accuracy.of(RECORDS) == figures.Accuracy(32, 1 / 3)
    assert figures.Accuracy.of([RECORDS[1]]) == figures.Accuracy(0, 1)


@pytest.mark.parametrize("records", [[], [{"request_id": 0, "rank_index": 1}]])
def test_who_predicts_nothing_has_no_error(records):
    accuracy = figures.Accuracy.of(records)
    assert accuracy == figures.Accuracy(None, None)
    assert accuracy.line() == "nothing predicted"


def test_requests_are_told_apart_by_their_number():
    two = [figures.Iteration(answered=1), figures.Iteration(answered=1)]
    accuracies = figures.by_iteration(RECORDS, two)
    assert accuracies == [figures.Accuracy(0, 1), figures.Accuracy(64, 0)]


def test_totals():
    iterations = [
        figures.Iteration(prompt_tokens=100, cached_tokens=0, served=[1, 3]),
        figures.Iteration(prompt_tokens=200, cached_tokens=100, served=[2, 2]),
    ]
    assert [each.load_spread for each in iterations] == [1.5, 1.0]
    assert [each.skip_rate for each in iterations] == [0, 0.5]
    assert figures.totals(iterations, True, 2, figures.Accuracy(1.23456, None)) == {
        "outputs_equal": True,
        "skip_rate": 0.3333,
        "prediction_error": 1.2346,
        "in_window": None,
        "lost": 2,
    }


def test_an_iteration_without_requests_has_figures():
    assert "skip rate 0.0%" in figures.Iteration().line()
