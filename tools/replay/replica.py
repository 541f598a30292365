"""A modelled replica: requests come in, steps pass, answers and cache events go out.

Steps that only decode are not gone through one by one: their times are a sum in closed form, so a
replica goes from one event to the next (an arrival, or a request that ends).
"""

from collections import deque
from heapq import heappop, heappush
from math import ceil, sqrt

from megatron.core.inference.coordinator.hashing import HASH_BYTES, expected_skip
from replay.cache import BlockCache, Node
from replay.loose_cache import LooseCache
from replay.profiles import Profile
from replay.workload import Request

_UNLIMITED = 2**60
"""Blocks: what is used and nothing else."""


class Job:
    """A request at a replica.

    Attributes:
        request: The request.
        todo: Tokens of its prefill that are still to be computed.
        reached: Tokens of its prompt that are in the cache or computed.
        private: Blocks it took that are not part of the tree.
        node: What it uses of the tree.
        kept: Bytes of its hashes that `node` ends at.
        estimate: Tokens that its prefill was thought to need when it came.
    """

    __slots__ = ("estimate", "kept", "node", "private", "reached", "request", "todo")

    def __init__(self, request: Request, estimate: int):
        self.request = request
        self.estimate = estimate
        self.todo = self.reached = self.private = self.kept = 0
        self.node: Node | None = None


class Replica:
    """One replica.

    Args:
        profile: Its times and limits.
        keeps: Whether it keeps blocks that nobody uses (`lru`).
        generated: Whether it also keeps the blocks of what it generated.

    Attributes:
        cache: Its blocks.
        queued: Tokens of prefill that wait or are being computed.
        prefilled: Tokens of prefill computed in all.
        prefill_time: Seconds of its steps that went into prefill.
        busy_time: Seconds of its steps.
        stored: Packed hashes of the chains stored in the step that ended last, each with the hash
            of the block that it extends.
        version: Grows when `ends` changes, so that a planned end can be told from a void one.
        ends: When the steps under way end; None when it is idle.
    """

    def __init__(self, profile: Profile, keeps: bool = True, generated: bool = False):
        self.profile = profile
        self.cache = _make_cache(profile, keeps)
        self.queued = self.prefilled = 0
        self.prefill_time = self.busy_time = 0.0
        self.stored: list[tuple[bytes, bytes]] = []
        self.version = 0
        self.ends: float | None = None
        self.generated = generated
        self._waiting: deque[Job] = deque()
        self._partial: Job | None = None  # a prompt of which some chunks are computed
        self._chunks: list[tuple[Job, int]] = []  # of the step under way
        self._decoding: list[tuple[int, int, Job]] = []  # by the step after which they end
        self._joined = 0
        self._context = 0  # tokens, of those that decode
        self._step = 0
        self._clock = 0  # of the cache: the step in which a prompt was scheduled last
        self._began = 0.0
        self._steps = 0  # under way, all but decoding ones alone

    @property
    def running(self) -> int:
        """Requests that have been scheduled and have not ended."""
        return len(self._decoding) + len(self._chunks)

    @property
    def batch(self) -> int:
        """Requests that it has, waiting ones included."""
        return len(self._decoding) + len(self._chunks) + len(self._waiting)

    # --- in ----------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """A request comes in; it is looked at when the present step ends."""
        cached = self.cache.depth(request.hashes)
        skip = expected_skip(request.prompt_tokens, cached, self.profile.block_size)
        self.queued += request.prompt_tokens - skip
        self._waiting.append(Job(request, request.prompt_tokens - skip))
        if self.ends is None:
            self.begin(now)
        elif len(self._waiting) == 1 and not self._chunks:
            self._cut_short(now)

    # --- out ---------------------------------------------------------------------------------

    def finish_steps(self, now: float) -> list[Request]:
        """The steps under way end; returns the requests that end with them."""
        self._account(now)
        self._step += self._steps
        self._context += self._steps * len(self._decoding)
        finished = []
        while self._decoding and self._decoding[0][0] <= self._step:
            finished.append(self._end(heappop(self._decoding)[2]))
        for job, chunk in self._chunks:
            self._computed(job, chunk)
            if job.todo:
                continue
            job.request.first_token = now
            if job.request.output_tokens > 1:
                self._joined += 1
                last = self._step + job.request.output_tokens - 1
                heappush(self._decoding, (last, self._joined, job))
                self._context += job.request.prompt_tokens + 1
            else:
                finished.append(self._end(job, decoded=False))
        for request in finished:
            request.finished = now
        self._chunks = []
        return finished

    # --- steps -------------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        """Begin the next steps, if there is anything to do."""
        self._began = now
        self.version += 1
        prefill = self._schedule(now) if self._waiting or self._partial else 0
        if prefill:
            self._steps = 1
        elif self._decoding:
            self._steps = self._decoding[0][0] - self._step
        else:
            assert not self._waiting, "a request does not fit into an empty replica"
            self.ends = None
            return
        self.ends = now + self._seconds(self._steps) + self.profile.prefill * prefill

    def _seconds(self, steps: int) -> float:
        """How long so many steps take that only decode; the context grows by a token a request."""
        profile, batch = self.profile, len(self._decoding)
        first = profile.step + profile.decode * batch + profile.context * self._context
        return steps * first + profile.context * batch * (steps * (steps - 1) / 2)

    def _cut_short(self, now: float) -> None:
        """Let the steps under way end with the one in which a request has come."""
        profile, batch = self.profile, len(self._decoding)
        growth = profile.context * batch / 2
        first = profile.step + profile.decode * batch + profile.context * self._context - growth
        past = max(0.0, now - self._began)
        steps = (
            past / first
            if not growth
            else ((sqrt(first * first + 4 * growth * past) - first) / (2 * growth))
        )
        steps = max(1, ceil(steps - 1e-9))
        if steps < self._steps:
            self._steps = steps
            self.version += 1
            self.ends = max(now, self._began + self._seconds(steps))

    def _account(self, now: float) -> None:
        took = now - self._began
        self.busy_time += took
        if self._chunks:
            self.prefill_time += self.profile.prefill * sum(chunk for _, chunk in self._chunks)

    # --- scheduling --------------------------------------------------------------------------

    def _schedule(self, now: float) -> int:
        """Fill a step's budget of prefill, first come first served; returns its tokens."""
        budget = self.profile.step_tokens
        used = 0
        self._clock = self._step
        coming: set[bytes] = set()
        if self._partial is not None:
            coming.add(_block_at(self._partial, self._partial.kept))
            used += self._take_chunk(self._partial, budget)
        held_back = []
        while self._waiting and used < budget and self.running < self.profile.max_requests:
            job = self._waiting[0]
            if self._is_coming(job, coming):
                held_back.append(self._waiting.popleft())
                continue
            if not self._admit(job, now):
                break
            self._waiting.popleft()
            coming.add(_block_at(job, job.kept))
            used += self._take_chunk(job, budget - used)
        self._waiting.extendleft(reversed(held_back))
        return used

    def _is_coming(self, job: Job, coming: set[bytes]) -> bool:
        """Whether the block that a request lacks first is being computed in this very step."""
        if not coming:
            return False
        block = _block_at(job, self.cache.depth(job.request.hashes) * HASH_BYTES)
        return bool(block) and block in coming

    def _admit(self, job: Job, now: float) -> bool:
        request, size, strict = job.request, self.profile.block_size, self.profile.strict
        node, there = self.cache.acquire(request.hashes, self._clock)
        whole = -(-(request.prompt_tokens + request.output_tokens) // size)
        blocks = (whole if strict else request.prompt_tokens // size) - there // HASH_BYTES
        if not self.cache.take(blocks):
            self.cache.release(node)
            return False
        skip = expected_skip(request.prompt_tokens, there // HASH_BYTES, size)
        request.cached_tokens = job.reached = skip
        request.scheduled = now
        job.node, job.kept, job.private = node, there, blocks
        job.todo = request.prompt_tokens - skip
        self.queued += job.todo - job.estimate
        return True

    def _take_chunk(self, job: Job, budget: int) -> int:
        chunk = min(job.todo, budget)
        self._chunks.append((job, chunk))
        self._partial = job if chunk < job.todo else None
        return chunk

    def _computed(self, job: Job, chunk: int) -> None:
        job.todo -= chunk
        job.reached += chunk
        self.queued -= chunk
        self.prefilled += chunk
        self._keep(job, job.reached // self.profile.block_size * HASH_BYTES)

    def _keep(self, job: Job, end: int) -> None:
        """Blocks of a prompt are computed as far as byte `end` of its hashes."""
        hashes = job.request.chain
        if end <= job.kept:
            return
        assert job.node is not None
        job.node, new = self.cache.extend(job.node, hashes, job.kept, end, self._clock)
        if new < end:
            self.stored.append((hashes[max(0, new - HASH_BYTES) : new], hashes[new:end]))
            job.private -= (end - new) // HASH_BYTES
        job.kept = end

    def _end(self, job: Job, decoded: bool = True) -> Request:
        request = job.request
        if decoded:
            self._context -= request.prompt_tokens + request.output_tokens
        if self.generated:
            tokens = request.prompt_tokens + request.output_tokens
            blocks = min(tokens // self.profile.block_size, len(request.chain) // HASH_BYTES)
            self._keep(job, blocks * HASH_BYTES)
        assert job.node is not None
        self.cache.release(job.node)
        self.cache.give(job.private)
        return request


def _make_cache(profile: Profile, keeps: bool) -> BlockCache:
    if profile.strict:
        return BlockCache(profile.total_blocks, keeps)
    return LooseCache(profile.total_blocks) if keeps else BlockCache(_UNLIMITED, keeps)


def _block_at(job: Job, at: int) -> bytes:
    """The block of a request's prompt that begins at a byte of its hashes; empty at the end."""
    return job.request.hashes[at : at + HASH_BYTES]
