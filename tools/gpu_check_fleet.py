"""The replicas of one run of gpu_check.py as processes, and the conversations held with them."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from gpu_check_parts import Outcome, Sizes, first_token_seconds, make_prompts
from gpu_check_replica import OURS, ReplicaSettings, run_replica

_LOG_LINES = 15
_GRACE_SECONDS = 2.0

_KEY_FILE = "MEGATRON_COORDINATOR_KEY_FILE"  # as in runtime/keys.py
_STORE_FILE = "MEGATRON_STORE_FILE"  # as in runtime/model.py


class FleetFailed(RuntimeError):
    """A replica ended or failed; the text says why and shows the end of its log."""


class OutOfTime(RuntimeError):
    """The budget ended first."""


class Budget:
    """Seconds that the whole check may take, counted from here."""

    def __init__(self, seconds: float):
        self._began = time.monotonic()
        self._seconds = seconds

    @property
    def spent(self) -> float:
        """Seconds gone."""
        return time.monotonic() - self._began

    @property
    def left(self) -> float:
        """Seconds to go; never below 0."""
        return max(0.0, self._seconds - self.spent)


class Fleet:
    """The replicas of one run; as a context manager it starts them, and ends all that is left.

    Args:
        sizes: Model, cache and prompts.
        coordinator: See `ReplicaSettings`.
        folder: Where their logs go.
        body: What each process runs.
    """

    def __init__(
        self,
        sizes: Sizes,
        coordinator: str,
        folder: Path,
        body: Callable[[ReplicaSettings, int, Connection], None] = run_replica,
    ):
        self._body = body
        self._sizes = sizes
        self._coordinator = coordinator
        self._folder = folder
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> "Fleet":
        # The replicas' coordinator writes its keys there, and this process's client reads them.
        os.environ[_KEY_FILE] = str(self._folder / "coordinator_keys.json")
        context = multiprocessing.get_context("spawn")
        environment = _environment(self._sizes, self._folder / f"{self._coordinator}_store")
        for rank in range(self._sizes.replicas):
            settings = ReplicaSettings(
                self._sizes, self._coordinator, str(self._log(rank)), environment
            )
            ours, theirs = context.Pipe()
            process = context.Process(target=self._body, args=(settings, rank, theirs))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        return self

    def __exit__(self, *error: object) -> None:
        """Each replica leads a group of processes: its coordinator goes with it."""
        for process in self._processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:  # it leads none yet, or all have gone
                process.kill()
            process.join(5)

    def ready(self, budget: Budget) -> list[dict[str, Any]]:
        """Wait until all serve; what each is, in the order of ranks."""
        return self._hear("ready", budget)

    def stop(self, budget: Budget) -> list[dict[str, Any]]:
        """Tell all to stop; what each did, in the order of ranks."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send("stop")
        return self._hear("stats", budget)

    def _hear(self, kind: str, budget: Budget) -> list[dict[str, Any]]:
        heard: dict[Connection, dict[str, Any]] = {}
        while len(heard) < len(self._pipes):
            talking = wait([pipe for pipe in self._pipes if pipe not in heard], budget.left)
            if not talking:
                raise OutOfTime(f"no time left while waiting for {kind} from all replicas")
            for pipe in talking:
                assert isinstance(pipe, Connection)
                heard[pipe] = self._receive(pipe, kind)
        return [heard[pipe] for pipe in self._pipes]

    def _receive(self, pipe: Connection, kind: str) -> dict[str, Any]:
        rank = self._pipes.index(pipe)
        try:
            said, what = pipe.recv()
        except (EOFError, OSError):
            said, what = "failed", f"replica {rank}: its process ended"
        if said != kind:
            raise FleetFailed(f"{what}\n{self._end_of_log(rank)}")
        return what

    def _log(self, rank: int) -> Path:
        return self._folder / f"{self._coordinator}_{rank}.log"

    def _end_of_log(self, rank: int) -> str:
        with contextlib.suppress(OSError):
            lines = self._log(rank).read_text(errors="replace").splitlines()[-_LOG_LINES:]
            return "\n".join(f"    {line}" for line in lines)
        return ""


def _environment(sizes: Sizes, store: Path) -> dict[str, str]:
    """What a launcher would set; every replica is local rank 0, which is the one GPU."""
    on_cpu = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return {
        _STORE_FILE: str(store),
        "WORLD_SIZE": str(sizes.replicas),
        "LOCAL_WORLD_SIZE": str(sizes.replicas),
        "LOCAL_RANK": "0",
        "PYTHONWARNINGS": "ignore",
        "TORCH_LOGS": "-all",
    } | (on_cpu if sizes.device == "cpu" else {})


class Sessions:
    """The conversations of one run, all held at the same time over one client.

    Args:
        coordinator: `OURS`, or else the released client is used.
        sizes: What to send.
        budget: When it ends, what is not answered yet counts as not sent.
        request_seconds: A request without an answer for so long counts as lost.
        say: Gets a line now and then.
    """

    def __init__(
        self,
        coordinator: str,
        sizes: Sizes,
        budget: Budget,
        request_seconds: float,
        say: Callable[[str], None],
    ):
        self._client_class, self._sampling = _client_of(coordinator, sizes.new_tokens)
        self._client: Any = None
        self._prompts = make_prompts(sizes)
        self._tell_every = max(1, sizes.requests // 4)
        self._budget = budget
        self._request_seconds = request_seconds
        self._say = say
        self._outcome = Outcome()

    def hold(self, address: str) -> Outcome:
        """Hold them, each turn after turn, with the coordinator at this address.

        Raises:
            OutOfTime: The client did not even connect in time; the released one has no timeout.
        """
        with _alarm(self._budget.left + _GRACE_SECONDS):
            return asyncio.run(self._hold(address))

    async def _hold(self, address: str) -> Outcome:
        self._client = self._client_class(address)
        self._client.start(asyncio.get_running_loop())
        began = time.perf_counter()
        try:
            await asyncio.gather(*map(self._session, range(len(self._prompts))))
        finally:
            self._outcome.seconds = time.perf_counter() - began
            self._client.stop()
        return self._outcome

    async def _session(self, session: int) -> None:
        """Turn after turn; a lost one loses those after it, which would only wait as long."""
        turns = self._prompts[session]
        for turn, prompt in enumerate(turns):
            if not self._budget.left:
                self._outcome.unsent += len(turns) - turn
                return
            try:
                await self._request(session, turn, prompt)
            except Exception as error:
                why = str(error) or type(error).__name__
                self._outcome.lost += [
                    f"session {session}, turn {each}: {why}" for each in range(turn, len(turns))
                ]
                return

    async def _request(self, session: int, turn: int, prompt: list[int]) -> None:
        sent = time.time()  # the engine stamps with this clock
        future = self._client.add_request(prompt, self._sampling)
        await asyncio.wait({future}, timeout=min(self._request_seconds, self._budget.left))
        if not future.done():
            if not self._budget.left:
                self._outcome.unsent += 1  # the turns after it are counted by the session
                return
            raise TimeoutError(f"no answer within {self._request_seconds:g} s")
        reply = future.result()
        if reply["status"] != "COMPLETED":
            raise RuntimeError(f"answered with status {reply['status']}")
        self._note((session, turn), reply, sent)

    def _note(self, key: tuple[int, int], reply: dict[str, Any], sent: float) -> None:
        outcome = self._outcome
        outcome.answers[key] = list(reply["generated_tokens"])
        seconds = first_token_seconds(reply, sent)
        if seconds is not None:
            outcome.first_token.append(seconds)
        if len(outcome.answers) % self._tell_every == 0:
            self._say(f"{len(outcome.answers)} requests answered")


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Break off whatever blocks the main thread, when everything else should have ended."""

    def ring(*_: Any) -> None:
        raise OutOfTime("the coordinator did not answer the client")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _client_of(coordinator: str, new_tokens: int) -> tuple[Any, Any]:
    """The client that belongs to a coordinator, and greedy sampling of a fixed length."""
    from megatron.core.inference.sampling_params import SamplingParams

    greedy = SamplingParams(num_tokens_to_generate=new_tokens, top_k=1, termination_id=-1)
    if coordinator == OURS:
        from megatron.core.inference.coordinator.runtime.client import InferenceClient as Ours

        return Ours, greedy
    from megatron.core.inference.inference_client import InferenceClient as Released

    return Released, greedy
