"""How much and how slowly a client may send, as options: the flags begin with `--http-`."""

from dataclasses import dataclass, field
from typing import ClassVar

from megatron.core.inference.coordinator.options import Settings, about

MIB = 2**20
KIB = 2**10

LARGE_BODY = 64 * KIB
"""Bytes beyond which a body counts as large: it is planned outside the event loop, and has to find
room in the budget of its front end."""

_FREE_BODY = 4 * MIB
_BYTES_PER_TOKEN = 32  # about 5 as text, 7 as an id; JSON may need 6 for a single character
_UNKNOWN_CONTEXT = 8 * MIB


@dataclass(frozen=True, slots=True)
class HttpSettings(Settings):
    """What a front end takes from its clients. Immutable and picklable.

    Raises:
        SettingsError: A value is out of its range.
    """

    PREFIX: ClassVar[str] = "http_"

    max_body_mib: int = field(
        default=0,
        metadata=about(
            "Largest request body, in MiB; a larger one is answered with 413 and not read. 0: 4, "
            "and 32 bytes for each token of the longest sequence (8 in all for 128k tokens, and "
            "where that is unknown). A prompt of 128k tokens takes about 1, as text or as token "
            "ids.",
            minimum=0,
        ),
    )
    max_header_kib: int = field(
        default=16,
        metadata=about(
            "Largest head of a request (its first line and headers), in KiB; a larger one is "
            "answered with 431.",
            minimum=1,
        ),
    )
    header_timeout: float = field(
        default=10.0,
        metadata=about(
            "Seconds from the first byte of a request to the end of its headers; then it is "
            "answered with 408.",
            minimum=0.1,
        ),
    )
    body_timeout: float = field(
        default=60.0,
        metadata=about(
            "Seconds for the whole body of a request to come, then it is answered with 408; and "
            "for the client to take the answer, then the connection is cut.",
            minimum=0.1,
        ),
    )
    idle_timeout: float = field(
        default=30.0,
        metadata=about(
            "Seconds that a connection may stay open without a request.",
            minimum=0.1,
        ),
    )
    body_budget_mib: int = field(
        default=128,
        metadata=about(
            "MiB that the bodies above 64 KiB of one front end may take together, until they are "
            "decoded and tokenized. A body that finds no room waits unread, and is answered with "
            "503 after 10 s. At least one of the largest size always fits.",
            minimum=1,
        ),
    )
    max_request_tokens: int = field(
        default=2**22,
        metadata=about(
            "Most tokens of one HTTP request: those it asks for, over all its choices, and "
            "likewise those of its prompts. 32 choices of 131,072 tokens just fit. More is "
            "answered with 400.",
            minimum=1,
        ),
    )

    def largest_body(self, max_sequence_tokens: int | None = None) -> int:
        """The largest body, in bytes.

        Args:
            max_sequence_tokens: Longest sequence of the model; None: unknown.
        """
        if self.max_body_mib:
            return self.max_body_mib * MIB
        if max_sequence_tokens is None:
            return _UNKNOWN_CONTEXT
        return -(-(_FREE_BODY + _BYTES_PER_TOKEN * max_sequence_tokens) // MIB) * MIB

    def body_budget(self, max_sequence_tokens: int | None = None) -> int:
        """What large bodies may take together, in bytes; see `largest_body`."""
        return max(self.body_budget_mib * MIB, self.largest_body(max_sequence_tokens))

    @property
    def max_header_bytes(self) -> int:
        """The largest head in bytes."""
        return self.max_header_kib * KIB
