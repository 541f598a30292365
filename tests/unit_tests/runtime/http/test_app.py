"""The application, driven by Quart's test client over an inference client that answers itself."""

import asyncio
import itertools
import json
import re

import msgpack
import pytest
import torch
from megatron.core.inference.contexts.dynamic_context import MaxSequenceLengthOverflowError
from megatron.core.inference.inference_request import DynamicInferenceRequest, Status
from megatron.core.inference.text_generation_server.dynamic_text_gen_server.endpoints import (
    chat_completions,
)

from megatron.core.inference.coordinator.messages import ErrorCode
from megatron.core.inference.coordinator.runtime.client import Overloaded, RequestFailed
from megatron.core.inference.coordinator.runtime.http.app import build_app
from megatron.core.inference.coordinator.runtime.http.fields import TEMPLATE_ARGUMENTS
from megatron.core.inference.coordinator.runtime.http.validation import GREEDY, sampling
from megatron.core.inference.coordinator.runtime.released import failed_reply

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]

BEGIN, END = 256, 257  # of a message


class Tokenizer:
    """A token per byte, and a chat template."""

    vocab_size = 258
    eod = eos_id = END
    bos = None
    chat_template = "yes"

    def __init__(self):
        self.tokenized = []

    def tokenize(self, text):
        if text == "unspeakable":
            raise ValueError("no token for it")
        self.tokenized.append(text)
        return list(text.encode())

    def detokenize(self, ids, **_):
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt, tools):
        assert tokenize
        if messages[0]["role"] == "nobody":
            raise ValueError("unknown role")
        ids = []
        for message in messages:
            ids += [BEGIN, *f"{message['role']}\n{message['content']}".encode(), END]
        return [*ids, BEGIN, *b"assistant\n"] if add_generation_prompt else ids


class PlainTokenizer(Tokenizer):
    chat_template = None


class Client:
    """Answers every request with "ok"; `script` replaces or changes answers, first one first."""

    def __init__(self, *script):
        self.script = list(script)
        self.seen = []
        self.profiling = False

    def add_request(self, prompt, params):
        self.seen.append((prompt, params))
        future = asyncio.get_running_loop().create_future()
        change = self.script.pop(0) if self.script else {}
        if isinstance(change, Exception):
            future.set_exception(change)
        else:
            future.set_result(answer(prompt, params) | change)
        return future

    def start_cuda_profiler(self):
        self.profiling = True


def answer(prompt, params):
    """What an engine's answer looks like after its way here."""
    request = DynamicInferenceRequest(
        request_id=1, prompt_tokens=torch.tensor(prompt), sampling_params=params
    )
    limit = params.num_tokens_to_generate
    request.generated_tokens = [*b"ok", END][:limit]
    request.sampling_params.num_tokens_to_generate = 100 if limit is None else limit
    request.status = Status.COMPLETED
    if params.return_log_probs:
        request.generated_log_probs = [-0.5 * (i + 1) for i in range(len(request.generated_tokens))]
        if params.top_n_logprobs:
            request.generated_top_n_logprobs = [{"x": -0.1} for _ in request.generated_tokens]
        if not params.skip_prompt_log_probs:
            request.prompt_log_probs = [-2.0] * (len(prompt) - 1)
    reply = msgpack.unpackb(msgpack.packb(request.serialize()))
    return reply | {
        "generated_text": bytes(t for t in request.generated_tokens if t < 256).decode()
    }


def failed(error):
    request = DynamicInferenceRequest(request_id=1, prompt_tokens=torch.tensor([1]))
    request.status = Status.FAILED
    request.add_event_error_nontransient(error)
    return request.serialize()


def app_with(client=None, tokenizer=None, **options):
    return build_app(client or Client(), tokenizer or Tokenizer(), **options)


def ask(app, path, body=None, *, method="POST", data=None, headers=None):
    """Status, decoded body and headers of one request; `body` is sent as JSON."""

    async def talk():
        options = {"headers": headers} if data is None else {"data": data, "headers": headers}
        if body is not None:
            options["json"] = body
        response = await app.test_client().open(path, method=method, **options)
        return response.status_code, await response.get_json(force=True), response.headers

    return asyncio.run(talk())


def chat(app, **fields):
    return ask(app, CHAT, {"messages": HELLO} | fields)


def complete(app, **fields):
    return ask(app, COMPLETIONS, {"prompt": "hi"} | fields)


def error(message, param=None, code="invalid_value", kind="invalid_request_error"):
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


# --- answers -----------------------------------------------------------------------------------


def test_chat_answer():
    status, body, headers = chat(app_with(replica=3, model_name="tiny"))
    assert status == 200
    assert (body["object"], body["model"]) == ("chat.completion", "tiny")
    [choice] = body["choices"]
    assert choice["message"]["content"] == "ok"
    assert choice["finish_reason"] == "stop"
    prompt = len(b"user\nhello") + 2 + len(b"assistant\n") + 1
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 3,
        "total_tokens": prompt + 3,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert headers["x-frontend-replica"] == "3"


def test_completion_answer():
    status, body, _ = complete(app_with(model_name="tiny"), max_tokens=2)
    assert status == 200
    assert (body["object"], body["model"]) == ("text_completion", "tiny")
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ok", "length")
    assert choice["prompt_token_ids"] == [*b"hi"]
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 2,
        "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("path", ["/models", "/v1/models"])
def test_models(path):
    status, body, _ = ask(app_with(model_name="org/tiny"), path, method="GET")
    assert status == 200
    assert body["object"] == "list"
    [model] = body["data"]
    assert isinstance(model.pop("created"), int)
    assert model == {"id": "org/tiny", "object": "model", "owned_by": "megatron"}
    status, one, _ = ask(app_with(model_name="org/tiny"), f"{path}/org/tiny", method="GET")
    assert (status, one["id"]) == (200, "org/tiny")
    status, body, _ = ask(app_with(), f"{path}/x", method="GET")
    assert status == 404
    assert body == error("The model x does not exist.", code="model_not_found")


def test_health_and_profile_are_megatrons():
    client = Client()
    status, body, _ = ask(app_with(client), "/v1/health", method="GET")
    assert (status, body["status"], body["ready"]) == (200, "ok", True)
    assert ask(app_with(client), "/start_profile")[0] == 200
    assert client.profiling


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
def test_health_says_why_requests_would_not_be_served_and_liveness_does_not(path):
    client = Client()
    app = app_with(client)
    for reason in (None, "the coordinator has no replica", None):
        client.unavailable = reason
        status, body, _ = ask(app, path, method="GET")
        assert (status, body["ready"]) == ((200, True) if reason is None else (503, False))
        assert body.get("details") == reason
        assert ask(app, f"{path}/live", method="GET")[:2] == (200, {"status": "ok"})


def test_ids_begin_as_openais():
    chats, completions = chat(app_with())[1]["id"], complete(app_with())[1]["id"]
    assert re.fullmatch("chatcmpl-[0-9a-f]{32}", chats)
    assert re.fullmatch("cmpl-[0-9a-f]{32}", completions)


def test_a_chat_of_five_turns_keeps_its_tokens():
    client = Client()
    app = app_with(client)
    messages = list(HELLO)
    for turn in range(5):
        status, body, _ = ask(app, CHAT, {"messages": messages})
        assert status == 200, body
        messages.append(body["choices"][0]["message"])
        messages.append({"role": "user", "content": f"turn {turn}"})
    prompts = [prompt for prompt, _ in client.seen]
    assert len(prompts) == 5
    for earlier, later in itertools.pairwise(prompts):
        assert later[: len(earlier) + 3] == [*earlier, *b"ok", END]


def test_chat_without_a_template_joins_contents():
    client = Client()
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "be "}, {"text": "brief"}]},
        {"role": "user", "content": None},
        {"role": "user", "content": "hello"},
    ]
    status, _, _ = ask(app_with(client, PlainTokenizer()), CHAT, {"messages": messages})
    assert status == 200
    assert client.seen[0][0] == [*b"be brief\n\nhello"]


# --- nulls and content types -------------------------------------------------------------------

CHAT_FIELDS = """stream temperature top_p top_k n max_tokens max_completion_tokens stop ignore_eos
    logprobs top_logprobs skip_prompt_log_probs add_BOS tools tool_choice parallel_tool_calls
    chat_template_kwargs prevent_retokenization return_tokenized_data return_raw_text seed user"""
COMPLETION_FIELDS = """stream temperature top_p top_k n max_tokens stop ignore_eos logprobs echo
    best_of suffix seed user"""


def test_null_means_default():
    for ask_with, names in ((chat, CHAT_FIELDS), (complete, COMPLETION_FIELDS)):
        nulls, nothing = Client(), Client()
        assert ask_with(app_with(nulls), **dict.fromkeys(names.split()))[0] == 200
        assert ask_with(app_with(nothing))[0] == 200
        assert nulls.seen == nothing.seen
        for name in names.split():
            status, body, _ = ask_with(app_with(), **{name: None})
            assert status == 200, (name, body)


def test_null_in_a_message_means_not_given():
    messages = [
        {"role": "user", "content": "a", "name": None, "tool_calls": None},
        {"role": "assistant", "content": None, "prompt_token_ids": None, "refusal": None},
        {"role": "user", "content": "b"},
    ]
    client = Client()
    assert ask(app_with(client), CHAT, {"messages": messages})[0] == 200
    assert client.seen[0][0][:9] == [BEGIN, *b"user\na", END, BEGIN]


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/json; charset=utf-8"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_content_type_does_not_matter(path, content_type):
    data = json.dumps({"messages": HELLO, "prompt": "hi"}).encode()
    headers = {"Content-Type": content_type} if content_type else {}
    assert ask(app_with(), path, data=data, headers=headers)[0] == 200


# --- sampling ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ask_with", [chat, complete])
@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1e-9}, {"top_p": 0}])
def test_greedy(ask_with, fields):
    client = Client()
    assert ask_with(app_with(client), **fields)[0] == 200
    params = client.seen[0][1]
    assert (params.temperature, params.top_k, params.top_p) == (1.0, 1, 0.0)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, (1.0, 0, 0.0)),
        ({"temperature": 0.7, "top_p": 0.9}, (0.7, 0, 0.9)),
        ({"top_k": 5}, (1.0, 5, 0.0)),
        ({"top_k": 5, "top_p": 1.0}, (1.0, 5, 0.0)),
        ({"top_k": 5, "top_p": 0.5}, (1.0, 5, 0.5)),  # the engine decides
        ({"top_k": -1, "top_p": 0.5}, (1.0, 0, 0.5)),
        ({"top_k": 258}, (1.0, 0, 0.0)),
        (
            {"top_k": 1, "temperature": 2.0},
            tuple(GREEDY[k] for k in ("temperature", "top_k", "top_p")),
        ),
    ],
)
def test_sampling_never_trips_the_engines_asserts(given, wanted):
    found = sampling(given, 258)
    assert (found["temperature"], found["top_k"], found["top_p"]) == wanted


@pytest.mark.parametrize("stop", ["END", ["END", "\n\n"]])
@pytest.mark.parametrize("ask_with", [chat, complete])
def test_stop_words_reach_the_engine(ask_with, stop):
    client = Client()
    assert ask_with(app_with(client), stop=stop, n=2)[0] == 200
    wanted = [stop] if isinstance(stop, str) else stop
    assert [params.stop_words for _, params in client.seen] == [wanted, wanted]


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 7, "max_tokens": 9}, 7),
        ({"max_completion_tokens": 0}, 0),
        ({}, None),
    ],
)
def test_chat_token_limits(fields, wanted):
    client = Client()
    status, body, _ = chat(app_with(client), **fields)
    assert status == 200, body
    assert client.seen[0][1].num_tokens_to_generate == wanted


@pytest.mark.parametrize("ask_with", [chat, complete])
def test_no_token_at_all(ask_with):
    status, body, _ = ask_with(app_with(), max_tokens=0)
    assert status == 200
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0


# --- log probabilities and echo ----------------------------------------------------------------


def test_completion_log_probs_are_in_step_with_tokens():
    status, body, _ = complete(app_with(), logprobs=1)
    assert status == 200
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["o", "k", ""],
        "token_logprobs": [-0.5, -1.0, -1.5],
        "top_logprobs": [{"x": -0.1}] * 3,
        "text_offset": [0, 1, 2],
    }


@pytest.mark.parametrize("limit", [0, 3])
def test_completion_echo_with_log_probs(limit):
    status, body, _ = complete(app_with(), logprobs=0, echo=True, max_tokens=limit)
    assert status == 200
    [choice] = body["choices"]
    assert choice["text"] == "hiok"[: 2 + limit]
    assert choice["logprobs"]["tokens"] == ["h", "i", "o", "k", ""][: 2 + limit]
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0, -0.5, -1.0, -1.5][: 2 + limit]


def test_chat_log_probs():
    status, body, _ = chat(app_with(), logprobs=True, top_logprobs=1)
    assert status == 200
    content = body["choices"][0]["logprobs"]["content"]
    assert [(each["token"], each["logprob"]) for each in content] == [
        ("o", -0.5),
        ("k", -1.0),
        ("", -1.5),
    ]
    assert content[0]["top_logprobs"] == [{"token": "x", "logprob": -0.1, "bytes": [120]}]


# --- n and usage -------------------------------------------------------------------------------


def test_completion_choices_come_prompt_by_prompt():
    client = Client(*({"generated_text": text} for text in ("a0", "a1", "b0", "b1")))
    tokenizer = Tokenizer()
    status, body, _ = complete(app_with(client, tokenizer), prompt=["A", "BB"], n=2, max_tokens=2)
    assert status == 200
    assert [(c["index"], c["text"]) for c in body["choices"]] == [
        (0, "a0"),
        (1, "a1"),
        (2, "b0"),
        (3, "b1"),
    ]
    assert [prompt for prompt, _ in client.seen] == [[65], [65], [66, 66], [66, 66]]
    assert tokenizer.tokenized == ["A", "BB"]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 8,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([97, 98], [[97, 98]]),
        ([[97, 98], [99]], [[97, 98], [99]]),
    ],
)
def test_the_four_forms_of_a_prompt(prompt, wanted):
    client = Client()
    assert complete(app_with(client), prompt=prompt)[0] == 200
    assert [prompt for prompt, _ in client.seen] == wanted


def test_completion_usage_counts_prompts_and_what_they_skipped_once():
    cached = [{"num_cached_tokens": tokens} for tokens in (0, 64, 16, 0, 99, 0)]
    prompts = [[7] * 80, [8] * 20, [9] * 3]
    _, body, _ = complete(app_with(Client(*cached)), prompt=prompts, n=2, max_tokens=1)
    assert body["usage"] == {
        "prompt_tokens": 103,
        "completion_tokens": 6,
        "total_tokens": 109,
        "prompt_tokens_details": {"cached_tokens": 64 + 16 + 3},
    }


def test_chat_usage_with_several_choices():
    client = Client({"num_cached_tokens": 0}, {"num_cached_tokens": 16}, {"num_cached_tokens": -1})
    status, body, _ = chat(app_with(client), n=3)
    assert status == 200
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["completion_tokens"] == 9
    assert body["usage"]["prompt_tokens"] == len(client.seen[0][0])
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


def test_answers_that_the_endpoint_encoded_itself_are_completed_too(monkeypatch):
    class Orjson:
        @staticmethod
        def dumps(value):
            return json.dumps(value).encode()

    monkeypatch.setattr(chat_completions, "HAVE_ORJSON", True)
    monkeypatch.setattr(chat_completions, "orjson", Orjson, raising=False)
    status, body, _ = chat(app_with(Client({"num_cached_tokens": 16}), model_name="tiny"))
    assert (status, body["model"]) == (200, "tiny")
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


# --- errors ------------------------------------------------------------------------------------

WRONG_TYPE = "invalid_type"
MISSING = "missing_required_parameter"

BOTH_WRONG = [
    ({"temperature": "hot"}, "temperature must be a number.", WRONG_TYPE),
    ({"temperature": True}, "temperature must be a number.", WRONG_TYPE),
    ({"temperature": -1}, "temperature must be between 0 and 100.", "invalid_value"),
    ({"temperature": 10**400}, "temperature must be between 0 and 100.", "invalid_value"),
    ({"temperature": float("nan")}, "temperature must be between 0 and 100.", "invalid_value"),
    ({"top_p": 1.5}, "top_p must be between 0 and 1.", "invalid_value"),
    ({"top_p": -0.1}, "top_p must be between 0 and 1.", "invalid_value"),
    ({"top_k": 2.5}, "top_k must be an integer.", WRONG_TYPE),
    ({"max_tokens": "x"}, "max_tokens must be an integer.", WRONG_TYPE),
    ({"max_tokens": True}, "max_tokens must be an integer.", WRONG_TYPE),
    ({"max_tokens": -1}, "max_tokens must be between 0 and 2147483647.", "invalid_value"),
    ({"n": 0}, "n must be between 1 and 128.", "invalid_value"),
    ({"n": 129}, "n must be between 1 and 128.", "invalid_value"),
    ({"n": "2"}, "n must be an integer.", WRONG_TYPE),
    ({"stop": 5}, "stop must be a string or a list of strings.", WRONG_TYPE),
    ({"stop": ["a", 5]}, "stop must be a string or a list of strings.", WRONG_TYPE),
    ({"stop": ""}, "stop must not be empty.", "invalid_value"),
    (
        {"stop": ["a", "b" * 1025]},
        "stop must have strings of at most 1024 characters.",
        "invalid_value",
    ),
    ({"stop": ["a"] * 65}, "stop must have at most 64 strings.", "invalid_value"),
    ({"stop": "\ud800"}, "stop has a lone surrogate, which is no character.", "invalid_value"),
    ({"ignore_eos": "no"}, "ignore_eos must be true or false.", WRONG_TYPE),
    (
        {"stream": True},
        "Streaming is not supported; send stream: false.",
        "unsupported_value",
    ),
    ({"stream": "no"}, "stream must be true or false.", WRONG_TYPE),
]


@pytest.mark.parametrize("ask_with", [chat, complete])
@pytest.mark.parametrize(("fields", "message", "code"), BOTH_WRONG)
def test_wrong_fields(ask_with, fields, message, code):
    client = Client()
    status, body, _ = ask_with(app_with(client), **fields)
    assert status == 400
    assert body == error(message, next(iter(fields)), code or "invalid_value")
    assert client.seen == []


@pytest.mark.parametrize(
    ("fields", "param", "message", "code"),
    [
        ({"messages": None}, "messages", "messages is missing or empty.", MISSING),
        ({"messages": []}, "messages", "messages is missing or empty.", MISSING),
        ({"messages": "hi"}, "messages", "messages must be a list.", WRONG_TYPE),
        ({"messages": {}}, "messages", "messages must be a list.", WRONG_TYPE),
        ({"messages": ["hi"]}, "messages[0]", "messages[0] must be an object.", WRONG_TYPE),
        (
            {"messages": [{"content": "hi"}]},
            "messages[0].role",
            "messages[0] has no role.",
            MISSING,
        ),
        (
            {"messages": [{"role": 5, "content": "hi"}]},
            "messages[0].role",
            "messages[0].role must be a string.",
            WRONG_TYPE,
        ),
        (
            {"messages": [*HELLO, {"role": "user", "content": 5}]},
            "messages[1].content",
            "messages[1].content must be a string or a list of text parts.",
            WRONG_TYPE,
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
            "messages[0].content[0] must be a text part.",
            "unsupported_value",
        ),
        (
            {"messages": [{"role": "assistant", "generation_token_ids": [1, 258]}]},
            "messages[0].generation_token_ids",
            "messages[0].generation_token_ids has a token id outside 0 to 257.",
            "invalid_value",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": {}}]},
            "messages[0].tool_calls",
            "messages[0].tool_calls must be a list.",
            WRONG_TYPE,
        ),
        (
            {"top_logprobs": 2},
            "top_logprobs",
            "top_logprobs needs logprobs: true.",
            "invalid_value",
        ),
        ({"logprobs": 1}, "logprobs", "logprobs must be true or false.", WRONG_TYPE),
        ({"tools": "all"}, "tools", "tools must be a list.", WRONG_TYPE),
        (
            {"tool_choice": "any"},
            "tool_choice",
            'tool_choice must be "none", "auto", "required" or an object.',
            "invalid_value",
        ),
        (
            {"chat_template_kwargs": []},
            "chat_template_kwargs",
            "chat_template_kwargs must be an object.",
            WRONG_TYPE,
        ),
        (
            {"max_completion_tokens": -5},
            "max_completion_tokens",
            "max_completion_tokens must be between 0 and 2147483647.",
            "invalid_value",
        ),
        (
            {"messages": [{"role": "nobody", "content": ""}]},
            "messages",
            "Error processing 'messages': unknown role",
            "invalid_value",
        ),
    ],
)
def test_wrong_chats(fields, param, message, code):
    status, body, _ = chat(app_with(), **fields)
    assert status == 400
    assert body == error(message, param, code)


FORMS = "prompt must be a string, a list of strings, a list of token ids, or a list of such lists."


@pytest.mark.parametrize(
    ("prompt", "param", "message", "code"),
    [
        (None, "prompt", "prompt is missing or empty.", MISSING),
        ("", "prompt", "prompt is missing or empty.", MISSING),
        ([], "prompt", "prompt is missing or empty.", MISSING),
        (5, "prompt", FORMS, WRONG_TYPE),
        ({"text": "hi"}, "prompt", FORMS, WRONG_TYPE),
        ([1, "a"], "prompt", FORMS, WRONG_TYPE),
        ([True], "prompt", FORMS, WRONG_TYPE),
        ([[1], "a"], "prompt", FORMS, WRONG_TYPE),
        ([["a"]], "prompt[0]", "prompt[0] must be a list of token ids.", WRONG_TYPE),
        (["a", ""], "prompt[1]", "prompt[1] is empty.", "invalid_value"),
        ([[1], []], "prompt[1]", "prompt[1] is empty.", "invalid_value"),
        ([1, -1], "prompt", "prompt has a token id outside 0 to 257.", "invalid_value"),
        ([1, 258], "prompt", "prompt has a token id outside 0 to 257.", "invalid_value"),
        ([[258]], "prompt[0]", "prompt[0] has a token id outside 0 to 257.", "invalid_value"),
        (
            "unspeakable",
            "prompt",
            "Error tokenizing prompt: no token for it",
            "invalid_value",
        ),
    ],
)
def test_wrong_prompts(prompt, param, message, code):
    status, body, _ = complete(app_with(), prompt=prompt)
    assert status == 400
    assert body == error(message, param, code)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logprobs": True}, "logprobs must be an integer."),
        ({"logprobs": "2"}, "logprobs must be an integer."),
        ({"echo": 1}, "echo must be true or false."),
    ],
)
def test_wrong_completion_fields(fields, message):
    status, body, _ = complete(app_with(), **fields)
    assert (status, body) == (400, error(message, next(iter(fields)), WRONG_TYPE))


def test_a_prompt_without_tokens():
    class Silent(Tokenizer):
        def tokenize(self, text):
            return []

    status, body, _ = complete(app_with(tokenizer=Silent()), prompt=" ")
    assert (status, body) == (400, error("The prompt has no tokens."))


def test_any_token_id_where_the_vocabulary_is_unknown():
    class Unbounded(Tokenizer):
        vocab_size = None

    assert complete(app_with(tokenizer=Unbounded()), prompt=[10**6])[0] == 200


def test_token_ids_of_a_padded_vocabulary():
    app = app_with(vocab_size=300)
    assert complete(app, prompt=[299])[0] == 200
    assert complete(app, prompt=[300])[0] == 400


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe{", b"[" * 10**5])
def test_bad_json(path, data):
    status, body, _ = ask(app_with(), path, data=data, headers={"Content-Type": "application/json"})
    assert status == 400
    message = body["error"].pop("message")
    assert message.startswith("The request body is not valid JSON: ")
    assert body["error"] == {"type": "invalid_request_error", "param": None, "code": "invalid_json"}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("body", [[], "text", 5, True])
def test_a_body_that_is_no_object(path, body):
    status, found, _ = ask(app_with(), path, body)
    assert status == 400
    assert found == error("The request body must be a JSON object.", None, WRONG_TYPE)


@pytest.mark.parametrize("ask_with", [chat, complete])
@pytest.mark.parametrize(
    "name",
    ["chat_template", "tokenizer", "parsers", "logits_processors", "custom_logit_processor"],
)
def test_code_and_paths_are_not_taken_from_requests(ask_with, name):
    client = Client()
    status, body, _ = ask_with(app_with(client), **{name: "{{ 7 * 7 }}"})
    message = f"{name} is not taken from requests: it is for the server to choose."
    assert (status, body) == (400, error(message, name, "unsupported_parameter"))
    assert client.seen == []
    assert ask_with(app_with(client), **{name: None})[0] == 200


@pytest.mark.parametrize("value", ["{{ 7 * 7 }}", None, 10**12, True])
@pytest.mark.parametrize("name", sorted(TEMPLATE_ARGUMENTS))
def test_template_variables_do_not_steer_the_rendering(name, value):
    client = Client()
    status, body, _ = chat(app_with(client), chat_template_kwargs={"enable": True, name: value})
    param = f"chat_template_kwargs.{name}"
    message = f"{param} is not taken from requests: it is for the server to choose."
    assert (status, body) == (400, error(message, param, "unsupported_parameter"))
    assert client.seen == []


def test_template_variables_reach_the_template():
    class Thinking(Tokenizer):
        def apply_chat_template(self, messages, *, enable_thinking, **kwargs):
            return [7] if enable_thinking else [8]

    client = Client()
    for value in (True, False):
        variables = {"enable_thinking": value}
        assert chat(app_with(client, Thinking()), chat_template_kwargs=variables)[0] == 200
    assert [prompt for prompt, _ in client.seen] == [[7], [8]]


class AnyVariables(Tokenizer):
    def apply_chat_template(self, messages, **kwargs):
        return [7]


def nested(levels):
    value = 0
    for _ in range(levels):
        value = {"anyOf": [value]}
    return value


@pytest.mark.parametrize("name", ["tools", "tool_choice", "chat_template_kwargs"])
def test_what_is_nested_too_deeply_is_refused(name):
    for levels, wanted in ((20, 200), (40, 400), (400, 400)):
        value = nested(levels)
        value = [{"function": value}] if name == "tools" else value
        status, body, _ = chat(app_with(tokenizer=AnyVariables()), **{name: value})
        assert status == wanted, body
    message = f"{name} must not be nested deeper than 64 levels."
    assert body == error(message, name)


def test_messages_that_are_nested_too_deeply_are_refused():
    status, body, _ = chat(app_with(), messages=[{"role": "user", "tool_calls": [nested(400)]}])
    name = "messages[0].tool_calls"
    assert (status, body) == (400, error(f"{name} must not be nested deeper than 64 levels.", name))


@pytest.mark.parametrize("what", ["messages", "tools", "messages[0].content"])
def test_lists_have_an_end(what):
    fields = {
        "messages": {"messages": HELLO * 10_001},
        "tools": {"tools": [{}] * 10_001},
        "messages[0].content": {"messages": [{"role": "user", "content": ["x"] * 10_001}]},
    }
    status, body, _ = chat(app_with(), **fields[what])
    assert (status, body) == (400, error(f"{what} must have at most 10000 items.", what))


@pytest.mark.parametrize(("prompts", "n", "most"), [(4097, 1, 4096), (33, 128, 32)])
def test_a_request_has_no_more_choices_than_a_fleet_can_answer(prompts, n, most):
    client = Client()
    status, body, _ = complete(app_with(client), prompt=["x"] * prompts, n=n)
    message = f"prompt must have at most {most} prompts with n {n}."
    assert (status, body) == (400, error(message, "prompt"))
    assert client.seen == []


CONTEXT = "This model's maximum context length was exceeded."


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [7] * 101},
        {"prompt": [[7], [7] * 101], "n": 128},
        {"prompt": ["x", "x" * 101], "n": 128},
        {"prompt": "x" * 200_000, "n": 128},
        {"messages": [{"role": "user", "content": "x" * 101}], "n": 128},
        {"messages": [{"role": "user", "content": "x" * 200_000}]},
    ],
)
def test_a_prompt_that_no_engine_can_take_gets_no_further(body):
    class Unread(Tokenizer):
        def detokenize(self, ids, **_):
            raise AssertionError("nobody asked for its text")

    client = Client()
    path = CHAT if "messages" in body else COMPLETIONS
    status, answer, _ = ask(app_with(client, Unread(), max_sequence_tokens=100), path, body)
    found = answer["error"]
    assert (status, found["code"]) == (400, "context_length_exceeded"), answer
    assert found["message"].startswith(CONTEXT)
    assert client.seen == []


def test_a_prompt_that_fills_the_context_is_the_engine_s_to_answer():
    """So is what asks for more tokens than are left: the engine cuts its answer."""
    client = Client()
    app = app_with(client, max_sequence_tokens=100)
    assert complete(app, prompt=[7] * 100, max_tokens=5)[0] == 200
    assert complete(app, prompt="x" * 100, max_tokens=10**6)[0] == 200
    assert [len(prompt) for prompt, _ in client.seen] == [100, 100]
    assert complete(app_with(client), prompt=[7] * 10**5)[0] == 200  # an unknown context


@pytest.mark.parametrize(
    ("body", "what", "param"),
    [
        (
            {"prompt": ["x"] * 32, "n": 128, "max_tokens": 8000},
            "4096 choices of up to 8000 tokens are 32768000",
            "max_tokens",
        ),
        (
            {"messages": HELLO, "n": 128, "max_completion_tokens": 32769},
            "128 choices of up to 32769 tokens are 4194432",
            "max_tokens",
        ),
        (
            {"messages": HELLO, "n": 33},
            "33 choices of up to 131049 tokens are 4324617",
            "max_tokens",
        ),
        (
            {"prompt": [[7] * 131072] * 33, "max_tokens": 1},
            "The prompts of its choices are 4325376",
            "prompt",
        ),
        (
            {"prompt": "x" * 131072, "n": 33},
            "The prompts of its choices are 4325376",
            "prompt",
        ),
    ],
)
def test_the_choices_of_a_request_have_only_so_many_tokens(body, what, param):
    client = Client()
    path = CHAT if "messages" in body else COMPLETIONS
    app = app_with(client, max_sequence_tokens=131072, max_body_bytes=2**26)
    status, answer, _ = ask(app, path, body)
    message = (
        f"{what} tokens; this server takes requests of up to 4194304 "
        "(--http-max-request-tokens). Send several requests."
    )
    assert (status, answer) == (400, error(message, param, "request_too_large"))
    assert client.seen == []


@pytest.mark.parametrize(
    "body",
    [
        {"messages": HELLO, "n": 16},
        {"messages": HELLO, "n": 32},
        {"messages": HELLO, "n": 16, "max_tokens": 131072},
        {"messages": HELLO, "n": 128, "max_tokens": 32768},
        {"prompt": ["x"] * 32, "n": 128},
        {"prompt": [7] * 130_000, "n": 16, "max_tokens": 1072},
    ],
)
def test_what_rollouts_usually_ask_for_is_taken(body):
    client = Client()
    path = CHAT if "messages" in body else COMPLETIONS
    status, answer, _ = ask(app_with(client, max_sequence_tokens=131072), path, body)
    assert status == 200, answer
    assert len(client.seen) == len(answer["choices"])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_choices_share_one_prepared_prompt(path):
    class Preparing(Client):
        def __init__(self):
            super().__init__()
            self.prepared = []

        def prepare(self, prompt, owner, salt):
            self.prepared.append(prompt)
            assert (owner.split()[0], salt) == ("address", 0)
            return tuple(prompt)

    client = Preparing()
    body = {"messages": HELLO, "prompt": ["A", "A", "BB"], "n": 128}
    for _ in range(2):  # nothing is kept from one request to the next
        assert ask(app_with(client), path, body)[0] == 200
    prompts = 1 if path == CHAT else 3
    assert len(client.prepared) == 2 * prompts
    assert len(client.seen) == 2 * prompts * 128
    assert len({id(prompt) for prompt, _ in client.seen}) == 2 * prompts


def test_fields_that_no_endpoint_reads_are_not_looked_at():
    client = Client()
    deep = nested(400)
    many = [[]] * 200_000
    for ask_with in (chat, complete):
        status, body, _ = ask_with(app_with(client), response_format=deep, made_up=many)
        assert status == 200, body


@pytest.mark.parametrize("name", ["tools", "tool_choice", "chat_template_kwargs"])
def test_free_json_has_an_end(name):
    value = {"enum": [[]] * 100_001}
    status, body, _ = chat(app_with(), **{name: [value] if name == "tools" else value})
    assert (status, body) == (400, error(f"{name} must not have more than 100000 values.", name))


def test_messages_have_so_many_values_together():
    messages = [{"role": "user", "content": "x", "extra": [0] * 600}] * 200
    status, body, _ = chat(app_with(), messages=messages)
    message = "The request must not have more than 100000 values."
    assert (status, body["error"]["message"]) == (400, message)


def test_only_the_tokens_of_the_last_answer_are_read():
    """Clients send those of every turn, each with the whole conversation before it."""
    spoken = {"role": "assistant", "content": "x", "generation_token_ids": [1]}
    early, late = spoken | {"prompt_token_ids": [10**9]}, spoken | {"prompt_token_ids": [1]}
    assert chat(app_with(), messages=[early, late, *HELLO])[0] == 200
    assert chat(app_with(), messages=[late, early, *HELLO])[0] == 400
    body = {"messages": [early], "prevent_retokenization": False}
    assert ask(app_with(), CHAT, body)[0] == 200


def test_a_completion_s_token_ids_are_detokenized_only_where_they_are_shown():
    status, body, _ = complete(app_with(), prompt=[*b"hi"], n=2, echo=True)
    assert (status, [each["text"] for each in body["choices"]]) == (200, ["hiok", "hiok"])


def test_a_profiler_that_the_coordinator_would_not_obey_is_refused():
    client = Client()
    status, body, _ = ask(app_with(client, may_control=False), "/start_profile")
    assert (status, body["error"]["code"]) == (403, "forbidden")
    assert not client.profiling


@pytest.mark.parametrize("path", ["/v1//models", "/v1/models/../models", "/v1/models/"])
def test_a_path_is_taken_as_it_is(path):
    status, body, _ = ask(app_with(), path, method="GET")
    assert status == 404
    assert body["error"]["code"] in ("unknown_url", "model_not_found")


def test_a_body_that_does_not_come_in_time():
    app = app_with(body_timeout=0.2)

    async def talk():
        headers = {"Content-Length": "5000"}
        async with app.test_client().request(CHAT, method="POST", headers=headers) as connection:
            await connection.send(b"{")
            await asyncio.sleep(0.5)
        response = await connection.as_response()
        return response.status_code, await response.get_json(), response.headers

    status, body, headers = asyncio.run(talk())
    assert status == 408
    assert body == error("The request did not come in time.", code="request_timeout")
    assert headers["Connection"] == "close"


def test_unknown_path():
    status, body, _ = ask(app_with(), "/v1/nothing", {})
    assert status == 404
    assert body == error(
        "There is nothing at POST /v1/nothing; this server has /v1/chat/completions, "
        "/v1/completions, /v1/models and /v1/health.",
        code="unknown_url",
    )


@pytest.mark.parametrize(
    ("path", "method", "allowed"),
    [(CHAT, "GET", "OPTIONS, POST"), ("/v1/models", "DELETE", "GET, HEAD, OPTIONS")],
)
def test_wrong_method(path, method, allowed):
    status, body, headers = ask(app_with(), path, method=method)
    assert status == 405
    assert body == error(f"{path} does not take {method} requests.", code="method_not_supported")
    assert headers["Allow"] == allowed


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_large(announced):
    app = app_with(max_body_bytes=1000)

    async def talk():
        headers = {"Content-Length": "5000"} if announced else {}
        async with app.test_client().request(CHAT, method="POST", headers=headers) as connection:
            for _ in range(5):
                await connection.send(b"x" * 1000)
            await connection.send_complete()
        response = await connection.as_response()
        return response.status_code, await response.get_json(), response.headers

    status, body, headers = asyncio.run(talk())
    assert status == 413
    assert headers["Connection"] == "close"
    assert body == error(
        "The request body is larger than this server accepts (--http-max-body-mib).",
        code="request_too_large",
    )


def test_a_chat_beyond_the_context_keeps_the_words_that_rl_clients_look_for():
    client = Client(failed(MaxSequenceLengthOverflowError(7)))
    status, body, _ = chat(app_with(client))
    assert status == 400
    tokens = len(client.seen[0][0])
    message = body["error"].pop("message")
    assert message.startswith(
        "This model's maximum context length was exceeded. Your messages resulted in "
        f"{tokens} tokens. Please reduce the length of the messages."
    )
    assert body["error"] == {
        "type": "invalid_request_error",
        "param": None,
        "code": "context_length_exceeded",
    }


def test_a_completion_beyond_the_context():
    status, body, _ = complete(app_with(Client(failed(MaxSequenceLengthOverflowError(7)))))
    assert status == 400
    assert body["error"]["code"] == "context_length_exceeded"
    assert body["error"]["message"].startswith("This model's maximum context length was exceeded.")


@pytest.mark.parametrize("ask_with", [chat, complete])
def test_what_an_engine_refuses_is_said_without_the_name_that_it_has_on_the_wire(ask_with):
    refused = failed_reply("this engine computes no log probabilities", transient=False)
    status, body, _ = ask_with(app_with(Client(refused)))
    assert status == 400
    assert body == error("this engine computes no log probabilities")


@pytest.mark.parametrize("ask_with", [chat, complete])
@pytest.mark.parametrize(
    ("failure", "status", "kind"),
    [
        (Overloaded(ErrorCode.OVERLOADED, "9 requests wait"), 429, "rate_limit_error"),
        (RequestFailed(ErrorCode.NO_REPLICA, "nobody serves"), 503, "server_error"),
        (RequestFailed(ErrorCode.REPLICA_LOST, "it was lost"), 503, "server_error"),
        (RequestFailed(ErrorCode.FLEET_PAUSED, "it is paused"), 503, "server_error"),
    ],
)
def test_refusals_of_the_coordinator_say_when_to_come_again(ask_with, failure, status, kind):
    found, body, headers = ask_with(app_with(Client({}, failure)), n=2)
    assert found == status
    assert body == error(str(failure), None, str(failure.code), kind)
    assert headers["Retry-After"] == "1"
    assert failure.retryable


@pytest.mark.parametrize("ask_with", [chat, complete])
def test_engine_failure(ask_with):
    status, body, headers = ask_with(app_with(Client(RuntimeError("boom"))))
    assert status == 500
    assert body == error("boom", None, "inference_error", "server_error")
    assert "Retry-After" not in headers


@pytest.mark.parametrize("ask_with", [chat, complete])
def test_a_fault_of_ours_is_logged_and_not_shown(ask_with, caplog):
    class Broken(Client):
        def add_request(self, prompt, params):
            raise KeyError("secret")

    status, body, headers = ask_with(app_with(Broken(), replica=2))
    assert status == 500
    assert body == error(
        "This server failed on the request; its log says why.",
        None,
        "internal_error",
        "server_error",
    )
    assert headers["x-frontend-replica"] == "2"
    assert "http_request_failed" in caplog.text
    assert "secret" in caplog.text
