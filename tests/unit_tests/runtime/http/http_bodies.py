"""JSON bodies that no client should send, made from the fields that the endpoints know."""

import json
from typing import Any

from hypothesis import strategies as st

from megatron.core.inference.coordinator.runtime.http import fields, validation

_NEST = {"list": ("[", "]"), "object": ('{"anyOf":[', "]}"), "property": ('{"properties":', "}")}

_NUMBERS = [10**400, -(10**400), 2**31 - 1, 2**31, 2**63, 1e308, -0.0, 0, -1, 1, 0.5]
_NO_NUMBERS = [float("nan"), float("inf"), True, False]
_TEXTS = ["\ud800", "a\udfff", "\0", "", " ", "<|end|>", "x" * 5000]
_SHAPES: list[Any] = [[], {}, [[]], [{}], [None], {"": None}]

_deep = st.builds(
    lambda kind, depth: f"@{kind}:{depth}@",
    st.sampled_from(sorted(_NEST)),
    st.sampled_from([10, 63, 64, 65, 500, 3000, 100_000]),
)
_odd = st.sampled_from([*_NUMBERS, *_NO_NUMBERS, *_TEXTS, *_SHAPES])
_leaf = st.one_of(_odd, _deep, st.none(), st.integers(), st.floats(), st.text(max_size=8))
_json = st.recursive(
    _leaf,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=6,
)
_text = st.one_of(st.text(max_size=20), st.sampled_from(_TEXTS))
_words = st.lists(_text, max_size=4)
_ids = st.lists(st.integers(-2, 262), max_size=6)


def _optional(needed: dict[str, Any], **optional: Any) -> Any:
    return st.fixed_dictionaries(needed, optional=optional)


_part = st.one_of(st.just({"type": "text", "text": "a"}), _json)
_called = _optional({"name": st.just("f")}, arguments=_json)
_call = _optional({}, id=_json, function=st.one_of(_json, _called))
_plain_message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant"]), "content": _text}
)
_odd_message = _optional(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "", None, 5, "\ud800"])},
    content=st.one_of(_text, st.lists(_part, max_size=3), _json),
    tool_calls=st.one_of(st.lists(_call, max_size=2), _json),
    prompt_token_ids=st.one_of(_ids, _json),
    generation_token_ids=st.one_of(_ids, _json),
    name=_json,
)

_schema = st.one_of(_deep, _optional({}, type=_json, anyOf=st.lists(_json, max_size=2)))
_usual_tool = st.builds(
    lambda x: {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"x": x}}},
    },
    _schema,
)
_function = _optional({"name": st.sampled_from(["f", None, 5])}, parameters=_json)
_tool = _optional({"type": st.just("function")}, function=st.one_of(_json, _function))
_variables = st.sampled_from([*sorted(fields.TEMPLATE_ARGUMENTS), "enable_thinking", "a", "eos"])

_plain_chat = st.lists(_plain_message, min_size=1, max_size=3)
_odd_chat = st.lists(st.one_of(_plain_message, _odd_message), min_size=1, max_size=3)
_likely: dict[str, Any] = {
    "messages": st.one_of(_plain_chat, _plain_chat, _odd_chat),
    "prompt": st.one_of(_text, _words, _ids, st.lists(_ids, max_size=3)),
    "temperature": st.floats(0, 3),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 300),
    "n": st.integers(1, 4),
    "max_tokens": st.integers(0, 50),
    "max_completion_tokens": st.integers(0, 50),
    "stop": st.one_of(_text, _words),
    "tools": st.one_of(st.lists(_tool, max_size=2), st.lists(_usual_tool, min_size=1, max_size=1)),
    "tool_choice": st.sampled_from(["none", "auto", "required", {"function": {"name": "f"}}]),
    "chat_template_kwargs": st.dictionaries(_variables, _json, max_size=2),
    "logprobs": st.sampled_from([True, False, 0, 3]),
    "top_logprobs": st.integers(0, 3),
}
_others = {name for name in _likely if name not in ("messages", "prompt")}
_known = [*sorted({*validation._CHAT, *validation._COMPLETION}), *sorted(_others)]
_ignored = ["model", "user", "seed", "response_format"]
_unknown = st.one_of(
    st.sampled_from([*sorted(validation._NEVER_TAKEN), *_ignored]), st.text(max_size=5)
)


@st.composite
def bodies(draw: Any, chat: bool) -> bytes:
    """A body with the field that an endpoint needs, mostly, and some others."""
    needed = "messages" if chat else "prompt"
    body = {needed: draw(_likely[needed])} if draw(st.integers(0, 9)) else {}
    for name in draw(st.lists(st.sampled_from(_known), max_size=3)):
        likely = _likely.get(name, st.booleans())
        body[name] = draw(likely if draw(st.integers(0, 9)) else _json)
    if not draw(st.integers(0, 7)):
        body[draw(_unknown)] = draw(_json)
    return _encoded(body)


def _encoded(value: Any) -> bytes:
    """JSON as bytes; what stands for deep nesting becomes that."""
    data = json.dumps(value)
    for mark in {part for part in data.split('"') if part.startswith("@") and part.endswith("@")}:
        kind, _, depth = mark.strip("@").partition(":")
        if kind in _NEST and depth.isdigit():
            opening, closing = _NEST[kind]
            data = data.replace(f'"{mark}"', opening * int(depth) + "0" + closing * int(depth))
    return data.encode()
