"""The data plane's load: clients and engines in one process, so that one core is left over."""

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import zmq

from coordinator_bench import frames
from coordinator_bench.plane_dialects import DIALECTS, Request
from coordinator_bench.plane_engines import Cache, PlaneConversation
from coordinator_bench.plane_keys import Keys, Pair
from coordinator_bench.plane_processes import processor_ns
from coordinator_bench.prompts import tokens_of

TURNS = 9
"""A conversation's prompts grow from 3/4 to 5/4 of the stated length, in equal steps."""
_CLIENTS = 4
_QUIET, _PATIENCE = 0.05, 60.0
"""Seconds without any message after which engines answer all they have, and after which a round is
given up."""
_ANSWER = frames.pack(frames.reply_of(0, range(300, 316)))


@dataclass(frozen=True, slots=True)
class Load:
    """What goes through the process.

    Attributes:
        tokens: Mean length of the prompts.
        block: Tokens in a block.
        ranks: Engines.
        in_flight: Requests in flight.
    """

    tokens: int
    block: int
    ranks: int
    in_flight: int

    @property
    def step(self) -> int:
        """Requests that an engine answers at once, the oldest that it has."""
        return max(1, self.in_flight // self.ranks // 2)

    @property
    def enough(self) -> int:
        """Requests that an engine must have before it answers some.

        So it has work most of the time, as under a real load, and what is at the engines leaves
        some for the coordinator to do.
        """
        return max(1, self.in_flight // self.ranks * 7 // 8)

    def lengths(self) -> list[int]:
        """Blocks of a conversation's prompts, turn by turn."""
        blocks = self.tokens // self.block
        return [round(blocks * (0.75 + 0.5 * turn / (TURNS - 1))) for turn in range(TURNS)]


@dataclass(frozen=True, slots=True)
class Round:
    """What one round measured.

    Attributes:
        requests: Answered requests.
        rate: Answered requests a second.
        loop_us: Microseconds of processor time a request in the process's main thread.
        process_us: The same in all of its threads.
        held: Share of the prompts' blocks that the engines held already.
        batch: Answers in an engine's message.
        busy: Share of its time that the load's own thread was busy; near 1 it is the bottleneck.
    """

    requests: int
    rate: float
    loop_us: float
    process_us: float
    held: float
    batch: float
    busy: float


class Generator:
    """Clients with conversations, and engines that answer at once.

    Args:
        name: What the frames go through: "ours", "released" or "limit".
        address: Its socket.
        pid: Its process.
        load: What is to go through.
        keys: What to speak CURVE with; None for plain.
    """

    def __init__(self, name: str, address: str, pid: int, load: Load, keys: Keys | None = None):
        self._load, self._pid = load, pid
        self._dialect = DIALECTS[name](load.block, _ANSWER)
        self._rng = np.random.default_rng(load.tokens)
        self._lengths = load.lengths()
        self._bodies = [_body(blocks * load.block) for blocks in self._lengths]
        self._slots = [self._conversation(slot % TURNS) for slot in range(load.in_flight)]
        # Room for the conversations of a rank, and as many that have ended.
        room = 2 * self._lengths[-1] * max(1, load.in_flight // load.ranks)
        self._caches = [Cache(room) for _ in range(load.ranks)]
        self._ranks = [slot % load.ranks for slot in range(load.in_flight)]
        for conversation, rank in zip(self._slots, self._ranks, strict=True):
            if conversation.turn:  # its earlier turns were computed somewhere
                self._caches[rank].serve(conversation, self._lengths[conversation.turn - 1])
        self._taken: list[list[tuple[Request, int]]] = [[] for _ in range(load.ranks)]
        context = zmq.Context()
        connect = partial(_dealer, context, address, keys)
        engine, client = (keys.engine, keys.client) if keys is not None else (None, None)
        self._engines = [connect(b"engine-%d" % n, engine) for n in range(load.ranks)]
        self._clients = [connect(b"client-%d" % n, client) for n in range(_CLIENTS)]
        self._poller = zmq.Poller()
        self._on_readable: dict[zmq.Socket, Callable[[], None]] = {}
        for rank, socket in enumerate(self._engines):
            self._on_readable[socket] = partial(self._take, rank)
            socket.send_multipart(self._dialect.engine_hello(rank, room))
        for socket in self._clients:
            self._on_readable[socket] = partial(self._collect, socket)

    def connect(self) -> None:
        """Introduce the clients, when the engines are known."""
        for socket in self._clients:
            socket.send_multipart(self._dialect.client_hello())
            if not socket.poll(int(_PATIENCE * 1000)):
                raise RuntimeError("a client's greeting is not answered")
            socket.recv_multipart()
        for rank in range(len(self._engines)):
            self._tell(rank)
        for socket in self._on_readable:
            self._poller.register(socket, zmq.POLLIN)

    def round(self, seconds: float) -> Round:
        """Keep requests in flight for so long, then wait for the last answer.

        Raises:
            RuntimeError: Answers do not come.
        """
        self._done = self._blocks = self._held = self._batches = 0
        self._waiting: deque[int] = deque()
        self._heard = time.perf_counter()
        used, own = processor_ns(self._pid), time.thread_time()
        began = time.perf_counter()
        sent = self._load.in_flight
        for slot in self._evenly():
            self._submit(slot)
        while self._done < sent:
            self._step_all()
            while self._waiting and time.perf_counter() - began < seconds:
                self._submit(self._waiting.popleft())
                sent += 1
        elapsed = time.perf_counter() - began
        loop, process = (b - a for a, b in zip(used, processor_ns(self._pid), strict=True))
        return Round(
            sent,
            sent / elapsed,
            loop / sent / 1000,
            process / sent / 1000,
            self._held / self._blocks,
            sent / self._batches,
            (time.thread_time() - own) / elapsed,
        )

    def _step_all(self) -> None:
        """Take what has arrived; engines that have enough answer."""
        now = time.perf_counter()
        readable = self._poller.poll(1)
        for socket, _ in readable:
            self._on_readable[socket]()
        if readable:
            self._heard = now
        elif now - self._heard > _PATIENCE:
            raise RuntimeError(f"nothing was answered for {_PATIENCE:.0f} s")
        quiet = now - self._heard > _QUIET
        for rank, taken in enumerate(self._taken):
            while len(taken) >= self._load.enough or (taken and quiet):
                self._answer(rank, taken[: self._load.step])
                del taken[: self._load.step]

    # --- clients ---------------------------------------------------------------------------------

    def _submit(self, slot: int) -> None:
        conversation = self._slots[slot]
        if conversation.turn == TURNS:
            conversation = self._slots[slot] = self._conversation(0)
        blocks, body = self._lengths[conversation.turn], self._bodies[conversation.turn]
        hashes = conversation.hashes[:blocks].tobytes()
        tokens = blocks * self._load.block
        message = self._dialect.request(slot, tokens, body, conversation.mark, hashes)
        # Frames below pyzmq's threshold are copied all the same: that is cheaper there.
        self._clients[slot % _CLIENTS].send_multipart(message, copy=False)

    def _evenly(self) -> list[int]:
        """All slots, those of one engine far apart.

        On a fleet that is still empty, two conversations of one engine in a row would drive the
        second one away, as no fleet at work does.
        """
        seen: Counter[int] = Counter()
        places = []
        for rank in self._ranks:
            places.append(seen[rank])
            seen[rank] += 1
        return sorted(range(len(places)), key=places.__getitem__)

    def _collect(self, socket: zmq.Socket) -> None:
        try:
            while True:
                slot = self._dialect.answered(socket)
                if slot is not None:
                    self._slots[slot].turn += 1
                    self._waiting.append(slot)
                    self._done += 1
        except zmq.Again:
            return

    def _conversation(self, turn: int) -> PlaneConversation:
        return PlaneConversation(self._rng, self._lengths[-1], self._load.block, turn)

    # --- engines ---------------------------------------------------------------------------------

    def _take(self, rank: int) -> None:
        """An engine takes what has arrived."""
        socket, taken = self._engines[rank], self._taken[rank]
        try:
            while True:
                request = self._dialect.receive(socket)
                if request is not None:
                    taken.append((request, self._compute(rank, request[0])))
        except zmq.Again:
            return

    def _answer(self, rank: int, requests: list[tuple[Request, int]]) -> None:
        """A step of an engine: these requests are through."""
        seen = self._caches[rank].next
        self._tell(rank)
        self._engines[rank].send_multipart(self._dialect.replies(requests, seen))
        self._batches += 1

    def _compute(self, rank: int, slot: int) -> int:
        conversation = self._slots[slot]
        blocks = self._lengths[conversation.turn]
        self._ranks[slot] = rank
        held = self._caches[rank].serve(conversation, blocks)
        self._blocks += blocks
        self._held += held
        return held * self._load.block

    def _tell(self, rank: int) -> None:
        if not self._dialect.tells:
            return
        first, packed = self._caches[rank].news()
        if len(packed):
            self._engines[rank].send_multipart(frames.events(first, packed))


def _body(tokens: int) -> bytes:
    return frames.array_header(tokens) + frames.packed_tokens(tokens_of(5, tokens))


def _dealer(
    context: zmq.Context, address: str, keys: Keys | None, identity: bytes, own: Pair | None
) -> Any:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity)
    for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
        socket.setsockopt(option, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 500)  # or an engine counts as lost between two rounds
    if keys is not None and own is not None:
        keys.apply(socket, own)
    socket.connect(address)
    return socket
