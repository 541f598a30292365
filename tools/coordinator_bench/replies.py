"""Batches of replies, short and long: what they cost the coordinator must not tell them apart."""

from coordinator_bench.frames import pack, reply_of
from coordinator_bench.options import Options
from coordinator_bench.rows import AGAINST_BASE, FASTER, Row, Target
from coordinator_bench.traffic import CLIENT, Traffic, deliver_all, make_side
from coordinator_bench.workers import alternate, workers

BATCH = 50
SHORT, LONG = 2_000, 32_000
_BATCHES = 20
"""Batches of ours in a round; the released coordinator takes milliseconds for each."""


class ReplySide:
    """One coordinator with one engine, which answers batches of requests.

    Args:
        name: "ours" or "released".
        block: Tokens in a block.
    """

    def __init__(self, name: str, block: int):
        self._name = name
        self._side = make_side(name, 1, block)
        self._traffic = Traffic(self._side)

    def round(self, tokens: int) -> float:
        """Microseconds of processor time for one batch of replies of so many tokens each."""
        batches = _BATCHES if self._name == "ours" else 1
        generated = list(range(256, 256 + tokens))
        answer = pack(reply_of(0, generated)) if self._name == "ours" else generated
        messages = []
        for _ in range(batches):
            ids = [placed.request_id for placed in self._traffic.submit_short(BATCH)]
            messages.append(self._side.replies(0, ids, answer))
        took, sent = deliver_all(self._side, messages)
        answered = [peer for delivery in sent for peer, _ in delivery]
        if answered != [CLIENT] * BATCH * batches:
            raise RuntimeError(f"{len(answered)} answers for {BATCH * batches} requests")
        return took / batches / 1000


def measure(options: Options) -> list[Row]:
    """The rows of this part."""
    made = {name: (ReplySide, name, options.block) for name in ("ours", "released")}
    with workers(**made) as sides:
        measures = {
            (name, tokens): lambda _, name=name, tokens=tokens: sides[name].call("round", tokens)
            for tokens in (SHORT, LONG)
            for name in sides
        }
        for name in sides:
            sides[name].call("round", SHORT)
        keyed = {f"{name} {tokens}": call for (name, tokens), call in measures.items()}
        found = alternate(options.rounds, keyed, "replies")
    short, long = (
        Row(
            "replies",
            f"batch of {BATCH}, {tokens:,} tokens each",
            "us",
            found[f"ours {tokens}"],
            found[f"released {tokens}"],
            ratios=(FASTER,),
        )
        for tokens in (SHORT, LONG)
    )
    against = Row(
        "replies",
        f"{LONG:,} tokens each; base: {SHORT:,}",
        "us",
        long.ours,
        base=short.ours,
        ratios=(AGAINST_BASE,),
        targets=(Target(AGAINST_BASE, at_most=1.3),),
    )
    return [short, long, against]
