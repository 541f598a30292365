"""What is done to the fleet, one kind after another in a random order."""

import asyncio
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from campaign.account import Account
from campaign.clients import Client, ReleasedClient
from campaign.fleet import Fleet, Replica
from megatron.core.inference.coordinator.lifecycle import Signal

KINDS = (
    "kill",
    "stop",
    "stop_briefly",
    "stop_coordinator",
    "stop_all",
    "hang",
    "cut",
    "client",
    "pause",
    "suspend",
    "epoch",
)
BEYOND_HUNG_SECONDS = 3.0
"""How much longer than the hung timeout a replica stands still; the coordinator looks once a
second."""

_BRIEF_SECONDS = 1.0
_STANDSTILL_SECONDS = (0.5, 9.0)  # clients give a coordinator up after 10 s
_CUTS_SECONDS = (1.0, 5.0)  # broken connections are found within 2 s
_PAUSE_SECONDS = 2.0
_ABANDONED = 6
"""Requests of a client that is lost."""
_CLIENT_START_SECONDS = 30


class Faults:
    """Breaks things.

    Args:
        fleet: What is broken.
        control: A client that may send control signals.
        prompts: What clients that are lost ask.
        account: Gets what they asked.
        rng: Chooses.
        kinds: What there is to choose from.
        hung_timeout: The coordinator's.

    Attributes:
        done: How often each kind happened.
        last: The kind that happened last.
    """

    def __init__(
        self,
        fleet: Fleet,
        control: Client | ReleasedClient,
        prompts: Sequence[list[int]],
        account: Account,
        rng: random.Random,
        kinds: Sequence[str],
        hung_timeout: float,
    ):
        self._fleet, self._control, self._account, self._rng = fleet, control, account, rng
        self._prompts = list(prompts[:_ABANDONED])
        self._kinds = kinds
        self._still = hung_timeout + BEYOND_HUNG_SECONDS
        self.done: Counter[str] = Counter()
        self.last = ""
        self._signalling = asyncio.Lock()
        self._epoch = 0
        self._deck: list[str] = []

    async def run(self, every: float, until: Callable[[], bool]) -> None:
        """Let something happen every so many seconds; return when all of it is over."""
        async with asyncio.TaskGroup() as group:
            await asyncio.sleep(every / 2)
            while not until():
                self._deck = self._deck or self._rng.sample(self._kinds, len(self._kinds))
                group.create_task(self.happen(self._deck.pop()))
                await asyncio.sleep(every)

    async def happen(self, kind: str) -> None:
        """Let one fault happen, and be over."""
        actions: dict[str, Callable[[], Awaitable[None]]] = {
            "kill": self._kill,
            "stop": lambda: self._stop(self._still),
            "stop_briefly": lambda: self._stop(_BRIEF_SECONDS),
            "stop_coordinator": lambda: self._stand_still(everybody=False),
            "stop_all": lambda: self._stand_still(everybody=True),
            "hang": self._hang,
            "cut": self._cut,
            "client": self._lose_client,
            "pause": lambda: self._pause(Signal.PAUSE, Signal.UNPAUSE),
            "suspend": lambda: self._pause(
                Signal.PAUSE, Signal.SUSPEND, Signal.RESUME, Signal.UNPAUSE
            ),
            "epoch": self._begin_epoch,
        }
        self.last = kind
        self.done[kind] += 1
        await actions[kind]()

    @asynccontextmanager
    async def _some_replica(self) -> AsyncIterator[Replica]:
        """One that nothing is done to otherwise."""
        while not (free := [r for r in self._fleet.replicas if not r.disturbed]):
            await asyncio.sleep(0.1)
        replica = self._rng.choice(free)
        replica.disturbed = True
        try:
            yield replica
        finally:
            replica.disturbed = False

    async def _kill(self) -> None:
        async with self._some_replica() as replica:
            await asyncio.to_thread(replica.kill)
            replica.start()

    async def _stop(self, seconds: float) -> None:
        async with self._some_replica() as replica:
            replica.signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(seconds)
            finally:
                replica.signal(signal.SIGCONT)

    async def _stand_still(self, *, everybody: bool) -> None:
        """The coordinator's machine does, and with it those of all replicas or of none."""
        fleet = self._fleet
        replicas = [r for r in fleet.replicas if everybody and not r.disturbed]
        for replica in replicas:
            replica.disturbed = True
            replica.signal(signal.SIGSTOP)
        fleet.coordinator.suspend()
        try:
            await asyncio.sleep(self._rng.uniform(*_STANDSTILL_SECONDS))
        finally:
            fleet.coordinator.resume()
            for replica in replicas:
                replica.signal(signal.SIGCONT)
                replica.disturbed = False

    async def _hang(self) -> None:
        async with self._some_replica() as replica:
            replica.signal(signal.SIGUSR1)
            await asyncio.sleep(self._still)

    async def _cut(self) -> None:
        async with self._some_replica() as replica:
            replica.relay.cut()
            try:
                await asyncio.sleep(self._rng.choice(_CUTS_SECONDS))
            finally:
                replica.relay.mend()

    async def _lose_client(self) -> None:
        fleet, children = self._fleet, self._fleet.children
        pipe, theirs = children.context.Pipe()
        arguments = fleet.kind, fleet.address, fleet.key_file, self._prompts, theirs
        process = children.start("lost-client", "campaign.clients:go_lost", *arguments)
        theirs.close()
        try:
            if await asyncio.to_thread(pipe.poll, _CLIENT_START_SECONDS):
                self._account.abandoned += pipe.recv()
            if self._rng.random() < 0.5:
                process.kill()
            else:
                pipe.send("leave")
            await asyncio.to_thread(process.join, 10)
        except EOFError:  # it did not get as far
            process.kill()
        finally:
            pipe.close()

    async def _pause(self, *signals: Signal) -> None:
        async with self._signalling:
            there, back = signals[: len(signals) // 2], signals[len(signals) // 2 :]
            for each in there:
                self._control.control(each)
            await asyncio.sleep(_PAUSE_SECONDS)
            for each in back:
                self._control.control(each)

    async def _begin_epoch(self) -> None:
        async with self._signalling:
            self._epoch += 1
            self._control.control(Signal.SET_GENERATION_EPOCH, self._epoch)
