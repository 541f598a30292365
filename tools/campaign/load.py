"""Requests of clients that stay: as fast as they are answered, or at a rate."""

import asyncio
import random
import time
from collections.abc import Sequence

from campaign.account import Account
from campaign.clients import Client, ReleasedClient

_TOP_UP_SECONDS = 0.005
_WARM_SHARE = 0.4
"""Share of a measurement that only fills the fleet."""


class Load:
    """Asks prompts of a set, in random order, through all clients in turn.

    Args:
        clients: Connected clients.
        prompts: The prompts.
        account: Theirs.
        rng: Chooses.
        most: Requests in flight beyond which nothing is sent: a fleet that a fault has left behind
            is to catch up, not to drown.
    """

    def __init__(
        self,
        clients: Sequence[Client | ReleasedClient],
        prompts: Sequence[list[int]],
        account: Account,
        rng: random.Random,
        most: int,
    ):
        self._clients, self._prompts, self._account = clients, prompts, account
        self._rng, self._most = rng, most
        self._turn = 0

    async def measure(self, seconds: float, in_flight: int) -> float:
        """Answers a second with so many requests in flight all the time."""
        end = time.monotonic() + seconds
        await self._keep(in_flight, end - (1 - _WARM_SHARE) * seconds)
        began, before = time.monotonic(), self._account.answered
        await self._keep(in_flight, end)
        return (self._account.answered - before) / (time.monotonic() - began)

    async def _keep(self, in_flight: int, end: float) -> None:
        while time.monotonic() < end:
            while self._account.in_flight < in_flight:
                self._submit()
            await asyncio.sleep(_TOP_UP_SECONDS)

    async def run(self, rate: float) -> None:
        """Ask at a rate, at random times, until cancelled."""
        due = time.monotonic()
        while True:
            due += self._rng.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            while self._account.in_flight >= self._most:
                await asyncio.sleep(_TOP_UP_SECONDS)
                due = time.monotonic()  # what was not sent meanwhile is not made up for
            self._submit()

    def _submit(self) -> None:
        self._turn += 1
        client = self._clients[self._turn % len(self._clients)]
        number = self._rng.randrange(len(self._prompts))
        client.submit(number, self._prompts[number])
