"""A pause and its owner: what becomes of requests when nobody is left to end it."""

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.dispatch import Dispatcher
from megatron.core.inference.coordinator.ledger import Ledger
from megatron.core.inference.coordinator.lifecycle import FleetState
from megatron.core.inference.coordinator.ranks import Rank, Ranks
from megatron.core.inference.coordinator.settings import CoordinatorSettings

_WAY_OUT = {
    FleetState.PAUSED: "send UNPAUSE",
    FleetState.SUSPENDED: "send RESUME and UNPAUSE",
}


class Pause:
    """Whose it is that the fleet is paused or suspended, if it is.

    It never ends a pause: only its owner knew whether the weights are whole.

    Args:
        settings: What the coordinator was started with.
        ranks: The replicas.
        ledger: The requests.
        dispatcher: Gives requests up.

    Attributes:
        owner: Name of the client that last said what the fleet should be; None while it runs.
    """

    def __init__(
        self, settings: CoordinatorSettings, ranks: Ranks, ledger: Ledger, dispatcher: Dispatcher
    ):
        self._limits = settings.fleet
        self._ranks = ranks
        self._ledger = ledger
        self._dispatcher = dispatcher
        self.owner: bytes | None = None
        self._alone_since: float | None = None

    def belongs_to(self, owner: bytes | None) -> None:
        """A client that is there says what the fleet is; None: it runs."""
        self.owner = owner
        self._alone_since = self._dispatcher.refusal = None

    def owner_left(self, clock: float) -> None:
        """The owner is gone; it may come back.

        Args:
            clock: Seconds that the coordinator was awake.
        """
        self._alone_since = clock

    def look_after(self, state: FleetState, now: float, clock: float) -> list[m.Effect]:
        """Let nobody wait in vain, and no suspended engine keep what nobody waits for.

        Args:
            state: The fleet's.
            now: The time.
            clock: Seconds that the coordinator was awake.
        """
        wait, alone = self._limits.pause_wait, self._alone_since
        if alone is not None and clock - alone >= wait and self._dispatcher.refusal is None:
            return self._abandon(state, now)
        effects: list[m.Effect] = []
        # A paused engine would lose its cache as well, which is void only after a suspend. Where no
        # copies of prompts are kept, what crosses a registration is lost.
        if state is FleetState.SUSPENDED and self._limits.max_retries:
            for rank in self._ranks.present:
                if not rank.released and self._ledger.for_nobody(rank.number):
                    effects += self._withdraw(rank, now)
            effects += self._dispatcher.route_waiting(clock)
        return effects

    def _abandon(self, state: FleetState, now: float) -> list[m.Effect]:
        """Answer all requests with an error, and from now on new ones."""
        gone_for = f"{self._limits.pause_wait:g} s"
        text = (
            f"the fleet is {state}, and the client that {state} it has been gone for {gone_for}; "
            "send the request again once the fleet runs"
        )
        fields = {
            "state": state.value,
            "owner_gone_for": gone_for,
            "requests": len(self._ledger),
            "advice": f"make sure that the weights are whole, then {_WAY_OUT[state]}",
        }
        self._dispatcher.refusal = text
        effects: list[m.Effect] = [m.Log("pause_abandoned", fields, warning=True)]
        effects += self._dispatcher.abandon(self._ledger.waiting, now, text)
        for rank in self._ranks.present:
            effects += self._withdraw(rank, now, text)
        return effects

    def _withdraw(self, rank: Rank, now: float, text: str = "") -> list[m.Effect]:
        """Give up what a rank has. It drops that as it registers again, since nothing is kept."""
        records = self._ledger.of_rank(rank.number)
        if not records:
            return []
        fields = {"rank": rank.number, "requests": len(records)}
        effects: list[m.Effect] = [m.Log("requests_withdrawn", fields)]
        effects += self._dispatcher.abandon(records, now, text)
        if not rank.released:
            effects.append(m.Send(rank.peer, m.RegisterAgain()))
        return effects
