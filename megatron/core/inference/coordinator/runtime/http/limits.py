"""How much and how slowly a client may send, as options: the flags begin with `--http-`."""

from dataclasses import dataclass, field
from typing import ClassVar

from megatron.core.inference.coordinator.options import Settings, about

MIB = 2**20
KIB = 2**10


@dataclass(frozen=True, slots=True)
class HttpSettings(Settings):
    """What a front end takes from one connection. Immutable and picklable.

    Raises:
        SettingsError: A value is out of its range.
    """

    PREFIX: ClassVar[str] = "http_"

    max_body_mib: int = field(
        default=64,
        metadata=about(
            "Largest request body, in MiB; a larger one is answered with 413 and not read. A "
            "prompt of 128k tokens takes about 1, as text or as token ids.",
            minimum=1,
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

    @property
    def max_body_bytes(self) -> int:
        """The largest body in bytes."""
        return self.max_body_mib * MIB

    @property
    def max_header_bytes(self) -> int:
        """The largest head in bytes."""
        return self.max_header_kib * KIB
