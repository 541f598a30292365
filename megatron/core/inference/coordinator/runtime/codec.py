"""Frames to messages and back for a coordinator, whose peers speak two dialects."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.runtime import released, wire


@dataclass(slots=True)
class _Dialect:
    """How a peer speaks: a guess by its first message, fixed by its CONNECT or registration."""

    released: bool
    introduced: bool
    wants_text: bool = False


_UNKNOWN = _Dialect(released=False, introduced=False)
_PASSERS_BY = 4096
"""Released peers remembered that have said something and never introduced themselves."""

_COMING_OR_GOING = frozenset((m.Connect, m.Register, m.Disconnect))


class Codec:
    """Knows how each peer speaks.

    Args:
        add_text: Adds `generated_text` to a packed reply. Released engines leave that to the
            coordinator; it is called only where the client has no tokenizer of its own.
    """

    def __init__(self, add_text: Callable[[bytes], bytes]):
        self._add_text = add_text
        self._dialects: dict[bytes, _Dialect] = {}
        self._passers_by: dict[bytes, None] = {}

    def decode(self, peer: bytes, frames: Sequence[Any]) -> m.ToCoordinator:
        """The message in some frames; `Malformed` where there is none. Never raises.

        Args:
            peer: Who sent them.
            frames: The first as bytes, the others as bytes or `zmq.Frame`.
        """
        try:
            if not frames:
                raise wire.WireError("no frame")
            # Released peers say everything in one frame.
            theirs = released.decode(frames[0]) if len(frames) == 1 else None
            message = wire.decode_for_coordinator(frames) if theirs is None else theirs
        except (wire.WireError, released.ReleasedError) as error:
            return m.Malformed(str(error))
        if peer not in self._dialects or type(message) in _COMING_OR_GOING:
            self._listen(peer, message, theirs is not None)
        return message

    def encode(self, peer: bytes, message: m.FromCoordinator) -> list[m.Body] | None:
        """The frames of a message in the peer's dialect, or None if it has no word for it."""
        dialect = self._dialects.get(peer, _UNKNOWN)
        if type(message) is m.RequestError and message.client_request_id is None:
            self._turn_away(peer, dialect)
        if dialect.wants_text and type(message) is m.Reply:
            body = message.body
            if isinstance(body, released.BodyWithoutText):
                message = m.Reply(message.client_request_id, self._add_text(body))
        return released.encode(message) if dialect.released else wire.encode(message)

    def forget(self, peer: bytes) -> None:
        """The peer is gone."""
        self._dialects.pop(peer, None)
        self._passers_by.pop(peer, None)

    def _turn_away(self, peer: bytes, dialect: _Dialect) -> None:
        """Its introduction is refused: one of ours needs not be known to be spoken to."""
        if not dialect.released:
            self.forget(peer)

    def _pass_by(self, peer: bytes, dialect: _Dialect) -> None:
        """Nobody says when such a one goes: the last few are remembered."""
        self._dialects[peer] = dialect
        self._passers_by[peer] = None
        if len(self._passers_by) > _PASSERS_BY:
            self.forget(next(iter(self._passers_by)))

    def _listen(self, peer: bytes, message: m.ToCoordinator, is_released: bool) -> None:
        """Learn how a peer speaks from its first message, or from how it comes or goes.

        An engine of ours is not remembered: nobody may ever say that it went, and an unknown peer
        is spoken to as it is.
        """
        known = self._dialects.get(peer)
        if isinstance(message, m.Register) and not is_released:
            if known is not None and not known.introduced:
                self.forget(peer)
            return
        introduces = isinstance(message, m.Connect | m.Register)
        if known is None or (introduces and not known.introduced):
            known = _Dialect(is_released, introduces)
            if introduces:
                self._dialects[peer] = known
                self._passers_by.pop(peer, None)
            elif is_released:
                self._pass_by(peer, known)
        if isinstance(message, m.Connect):
            known.wants_text = message.text_prompts
        elif isinstance(message, m.Disconnect):
            self.forget(peer)
