"""How large a run is: the full one, and the quick one for every change."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    """Sizes of a run.

    Attributes:
        block: Tokens in a block.
        rounds: Turns of each side.
        quick: Whether the sizes are those of `--quick`.
        turns: Shares of its longest prompt that a conversation's turns have; the last is measured.
        in_flight: Requests in flight in a measured turn.
        index_blocks: Blocks of the index whose memory and stalls are measured.
        plane_tokens: Prompt lengths of the data plane.
        plane_released: Prompt lengths at which the released coordinator is measured too.
        plane_curve: Prompt lengths that are measured over encrypted connections too.
        plane_in_flight: Requests in flight in the data plane.
        plane_seconds: How long requests are sent in one of its rounds.
        burst_rounds: Bursts placed by each policy, in another order each.
    """

    block: int = 64
    rounds: int = 5
    quick: bool = False
    turns: tuple[float, ...] = (0.5, 0.625, 0.75, 0.875, 1.0)
    in_flight: int = 32
    index_blocks: int = 1_000_000
    plane_tokens: tuple[int, ...] = (1024, 4096, 32768, 131072)
    plane_released: tuple[int, ...] = (1024, 4096, 32768, 131072)
    plane_curve: tuple[int, ...] = (1024, 4096, 32768, 131072)
    plane_in_flight: int = 256
    plane_seconds: float = 2.0
    burst_rounds: int = 5


def quick(block: int, rounds: int) -> Options:
    """Small enough for less than a minute on two shared cores."""
    return Options(
        block=block,
        rounds=rounds,
        quick=True,
        turns=(0.875, 1.0),
        in_flight=8,
        index_blocks=62_500,
        plane_tokens=(1024, 32768),
        plane_released=(32768,),
        plane_curve=(1024,),
        plane_in_flight=128,
        plane_seconds=0.3,
        burst_rounds=1,
    )
