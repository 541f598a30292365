"""One campaign: start, measure, disturb, settle, and what came of it."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from campaign.account import Account
from campaign.children import Children
from campaign.clients import KINDS as CLIENTS
from campaign.clients import Client, ReleasedClient
from campaign.faults import BEYOND_HUNG_SECONDS, Faults
from campaign.fleet import CoordinatorEnded, Fleet, OurFleet, ReleasedFleet
from campaign.load import Load
from campaign.prompts import checksum, make_prompts
from campaign.verdict import Options
from megatron.core.inference.coordinator.runtime import wire

MIB = 1 << 20
_LOAD_CLIENTS = 4
_MEASURE_SECONDS, _WARM_UP_SECONDS = 6.0, 1.5
"""How long capacity is measured; and, where the rate is given, how long the fleet is warmed up."""
_IN_FLIGHT_EACH = 8
"""Requests in flight on each replica while capacity is measured."""
_MOST_EACH = 48
_SHARE = 0.8
_BACK_SECONDS = 60.0
_REFERENCE_SECONDS = 180.0
_SETTLED_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Sample:
    """What the coordinator's process holds: open descriptors, and bytes of memory."""

    descriptors: int
    rss: int

    @classmethod
    def of(cls, fleet: Fleet) -> "Sample":
        """At this moment."""
        return cls(fleet.coordinator.num_fds(), fleet.coordinator.memory_info().rss)


class Campaign:
    """A campaign on one fleet after another: a coordinator that ends is started anew.

    Args:
        options: What is asked for.
        folder: For logs.
        say: Tells how far it is.
    """

    def __init__(self, options: Options, folder: Path, say: Callable[[str], None]):
        self.options, self._folder, self._say = options, folder, say
        kind = "released" if options.released else options.engines
        self._children = Children(kind, folder, options.hung_timeout + BEYOND_HUNG_SECONDS)
        self._prompts = make_prompts(options.seed)
        self._rng = random.Random(options.seed)
        self._account = Account(None, options.deadline)
        self._faults: Counter[str] = Counter()
        self.died: list[dict[str, Any]] = []
        self._began = self._seconds = 0.0
        self._sent_before = self._sent_during = 0
        self._last_fault = ""
        self._capacity: float | None = None

    async def run(self) -> dict[str, Any]:
        """Go through it; returns the figures."""
        reference = None
        if self.options.engines == "real" and not self.options.released:
            reference = self._folder / "answers.json"
            self._children.start(
                "reference", "campaign.real_engine:answer_alone", self._prompts, str(reference)
            )
        ours: dict[str, Any] = {}
        while True:
            fleet = self._make_fleet()
            try:
                ours = await self._on(fleet, reference)
                break
            except CoordinatorEnded as ended:
                self._note_death(str(ended))
            finally:
                await fleet.close()
            if not self.options.released or not self._began or self._over():
                break
        return self._figures() | ours

    def _make_fleet(self) -> Fleet:
        options = self.options
        if options.released:
            return ReleasedFleet(self._folder, self._children, options.replicas)
        flags = [
            f"--inference-coordinator-hung-timeout={options.hung_timeout:g}",
            "--inference-coordinator-first-answer-timeout=0",  # replicas start in seconds
            f"--inference-coordinator-max-retries={options.retries}",
        ]
        return OurFleet(self._folder, self._children, options.replicas, options.engines, flags)

    def _note_death(self, how: str) -> None:
        self._account.lose_all()
        self.died.append(
            {
                "after": self._last_fault,
                "at": round(time.monotonic() - self._began, 1) if self._began else 0.0,
                "how": how,
            }
        )
        self._say(f"{how}, after {self._last_fault}")

    def _over(self) -> bool:
        return bool(self._began) and time.monotonic() - self._began >= self.options.minutes * 60

    # --- one fleet -------------------------------------------------------------------------------

    async def _on(self, fleet: Fleet, reference: Path | None) -> dict[str, Any]:
        self._last_fault = "its start"
        self._say(f"starting {self.options.replicas} replicas")
        await fleet.start()
        await self._learn_answers(fleet, reference)
        base = len(self.died) * _LOAD_CLIENTS
        clients = [
            CLIENTS[fleet.kind](base + n, fleet.address, fleet.key_file, self._account)
            for n in range(_LOAD_CLIENTS)
        ]
        for client in clients:
            client.open()
        try:
            figures = await self._with(fleet, clients)
        finally:
            for client in clients:
                client.close()
        return figures | await self._stop(fleet) if isinstance(fleet, OurFleet) else figures

    async def _learn_answers(self, fleet: Fleet, reference: Path | None) -> None:
        if reference is None:
            answers = [checksum(wire.pack(prompt)) for prompt in self._prompts]
        else:
            self._say("waiting for the undisturbed engine's answers")
            await fleet.wait_until(reference.exists, _REFERENCE_SECONDS)
            answers = json.loads(reference.read_text())
        self._account.expected = answers

    async def _with(self, fleet: Fleet, clients: list[Client | ReleasedClient]) -> dict[str, Any]:
        options, account = self.options, self._account
        most = _MOST_EACH * options.replicas
        load = Load(clients, self._prompts, account, self._rng, most)
        if self._capacity is None:
            self._say("measuring the capacity")
            seconds = _MEASURE_SECONDS if options.rate is None else _WARM_UP_SECONDS
            self._capacity = await load.measure(seconds, _IN_FLIGHT_EACH * options.replicas)
        rate = options.rate or max(1.0, _SHARE * self._capacity)
        await self._drain(fleet)
        before = Sample.of(fleet)
        if not self._began:
            self._say(f"capacity {self._capacity:.1f}/s; {rate:.1f}/s from now on")
            self._began, self._sent_before = time.monotonic(), account.sent
        faults = Faults(
            fleet,
            clients[0],
            self._prompts,
            account,
            self._rng,
            options.faults,
            options.hung_timeout,
        )
        try:
            await self._disturb(fleet, load, faults, rate)
        except* CoordinatorEnded as group:
            raise group.exceptions[0] from None
        finally:
            self._faults += faults.done
            self._seconds = time.monotonic() - self._began
            self._sent_during = account.sent - self._sent_before
            self._last_fault = faults.last
        self._say("no more faults: waiting for the last answers")
        return await self._settle(fleet, before)

    async def _disturb(self, fleet: Fleet, load: Load, faults: Faults, rate: float) -> None:
        async with asyncio.TaskGroup() as group:
            others = [
                group.create_task(load.run(rate)),
                group.create_task(self._watch(fleet, faults)),
            ]
            # At first in any case: a fleet that was started anew near the end is to see one, too.
            await faults.run(self.options.every, self._over)
            for task in others:
                task.cancel()

    async def _watch(self, fleet: Fleet, faults: Faults) -> None:
        account, total = self._account, round(self.options.minutes * 60)
        with tqdm(total=total, unit="s", disable=None, bar_format=_BAR) as bar:
            while True:
                await asyncio.sleep(0.5)
                self._last_fault = faults.last or self._last_fault
                fleet.look_after()
                account.expire(time.monotonic())
                account.check_integrity()
                bar.n = min(total, round(time.monotonic() - self._began))
                bar.set_postfix_str(
                    f"{account.answered} answered, {account.errored} errors, "
                    f"{account.lost} lost, {account.twice} twice; {faults.last}"
                )

    async def _drain(self, fleet: Fleet) -> None:
        """Wait until every request has ended, in whatever way."""

        def ended() -> bool:
            self._account.expire(time.monotonic())
            return self._account.in_flight == 0

        await fleet.wait_until(ended, self.options.deadline + 5)

    async def _settle(self, fleet: Fleet, before: Sample) -> dict[str, Any]:
        await self._drain(fleet)
        back = True
        try:
            await fleet.wait_until(fleet.all_there, _BACK_SECONDS)
        except TimeoutError:
            back = False

        def gone() -> bool:
            return Sample.of(fleet).descriptors <= before.descriptors

        with suppress(TimeoutError):
            await fleet.wait_until(gone, _SETTLED_SECONDS)
        after = Sample.of(fleet)
        return {
            "all_back": back,
            "ended": sum(replica.ended for replica in fleet.replicas),
            "descriptors": [before.descriptors, after.descriptors],
            "rss_mib": [round(before.rss / MIB, 1), round(after.rss / MIB, 1)],
        }

    async def _stop(self, fleet: OurFleet) -> dict[str, Any]:
        """What the coordinator says at its end."""
        totals = await fleet.stop()
        late = totals.get("reply_dropped", 0) + totals.get("reply_from_stranger", 0)
        return {
            "ranks_lost": totals.get("rank_lost", 0),
            "taken_back": fleet.log.taken_back,
            "late_dropped": late,
            "exceptions": fleet.log.exceptions,
            "events": dict(totals),
        }

    def _figures(self) -> dict[str, Any]:
        account = self._account
        account.lose_all()
        account.check_integrity()
        return {
            "sent": account.sent,
            "answered": account.answered,
            "errored": account.errored,
            "lost": account.lost,
            "twice": account.twice,
            "faults": dict(sorted(self._faults.items())),
            "wrong": account.wrong,
            "late": account.late,
            "errors": dict(account.errors),
            "abandoned": account.abandoned,
            "died": self.died,
            "engines": "released" if self.options.released else self.options.engines,
            "replicas": self.options.replicas,
            "seed": self.options.seed,
            "seconds": round(self._seconds, 1),
            "capacity": round(self._capacity or 0.0, 1),
            "rate": round(self._sent_during / self._seconds, 1) if self._seconds else 0.0,
            "latency_p50": round(account.latency(0.5), 3),
            "latency_p99": round(account.latency(0.99), 3),
        }


_BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} s {postfix}"
