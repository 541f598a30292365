"""A tokenizer that needs no files: one token per byte of UTF-8, and four special tokens."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

TOKENIZER_TYPE = "ByteTokenizer"
"""Its name for `--tokenizer-type`."""

_BYTES = 256
_END, _BEGIN, _ROLE, _PAD = range(_BYTES, _BYTES + 4)
_SPELLING = {_END: "<|end|>", _BEGIN: "<|begin|>", _ROLE: "<|role|>", _PAD: "<|pad|>"}


class ByteTokenizer:
    """Text to bytes and back, with megatron-core's tokenizer interface, chat included.

    Text never becomes a special token, so what a user writes cannot end a message. Any list of
    ids has a text, as a model may emit bytes that are no UTF-8. Instances pickle.

    Attributes:
        vocab_size: Number of ids, special ones included.
        eod: Ends a message and a generation; also called `eos` and `eos_id`.
        bos: Begins a prompt where one asks for it; also called `bos_id`.
        pad: Fills up; also called `pad_id`.
        chat_template: How one chat message reads, for `str.format`.
    """

    vocab_size = _BYTES + len(_SPELLING)
    eod = eos = eos_id = _END
    bos = bos_id = _BEGIN
    pad = pad_id = _PAD
    chat_template = "{role}\n{content}"

    def tokenize(self, text: str) -> list[int]:
        """The bytes of `text` in UTF-8, lone surrogates included."""
        return list(text.encode("utf-8", errors="surrogatepass"))

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; U+FFFD stands for bytes that are no UTF-8.

        Args:
            ids: Token ids. Those outside the vocabulary are left out.
            skip_special_tokens: Leave special tokens out, or spell them.
        """
        pieces = self._pieces(ids, skip_special_tokens)
        return b"".join(pieces).decode("utf-8", errors="replace")

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        """Where in `text` each id begins: the number of characters before it."""
        return [len(self.detokenize(ids[:index])) for index in range(len(ids))]

    def apply_chat_template(
        self,
        conversation: Sequence[dict[str, Any]],
        chat_template: str | None = None,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        tools: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> list[int] | str:
        """The prompt of a chat: each message is a role token, role, newline, content, end token.

        A later turn of the same chat begins with the tokens of the earlier turn's prompt.

        Args:
            conversation: Messages with `role`, `content` and, optionally, `tool_calls`.
            chat_template: Another template, see the attribute.
            tokenize: Return ids, or their text with special tokens spelled.
            add_generation_prompt: End with the opening of the assistant's message.
            tools: Tools on offer; they become a first message of role "tools", as JSON.
            kwargs: Accepted, as templates differ in what they read; unused.
        """
        template = chat_template or self.chat_template
        messages = [("tools", json.dumps(tools))] if tools else []
        messages += [(str(each["role"]), _content(each)) for each in conversation]
        ids: list[int] = []
        for role, content in messages:
            ids += [_ROLE, *self.tokenize(template.format(role=role, content=content)), _END]
        if add_generation_prompt:
            ids += [_ROLE, *self.tokenize(template.format(role="assistant", content=""))]
        return ids if tokenize else self.detokenize(ids, skip_special_tokens=False)

    @staticmethod
    def _pieces(ids: Iterable[int], skip_special_tokens: bool) -> Iterable[bytes]:
        for token in ids:
            if 0 <= token < _BYTES:
                yield bytes((token,))
            elif not skip_special_tokens and token in _SPELLING:
                yield _SPELLING[token].encode()


def _content(message: dict[str, Any]) -> str:
    """A message's text, followed by its tool calls as JSON."""
    text = str(message.get("content") or "")
    calls = message.get("tool_calls")
    return f"{text}\n{json.dumps(calls)}" if calls else text
