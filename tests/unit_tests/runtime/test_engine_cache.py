"""Cache events and weight epochs on megatron-core's real engine.

Each test of a weight update has its control: the same on the engine as released, where KV of the
old weights is reused and the answer is wrong.
"""

import contextlib
import random
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.inference.sampling_params import SamplingParams

from megatron.core.inference.coordinator.hashing import (
    HASH_BYTES,
    block_hashes,
    packed_block_hashes,
    rekeyed,
)
from megatron.core.inference.coordinator.kv_events import BREAK, CLEARED, Change, segments

BLOCK = 16
PROMPT = list(b"It was the best of times, it was the worst of times, it was the age of wisdom")
GREEDY = {"top_k": 1, "num_tokens_to_generate": 8, "termination_id": -1}


class Rig:
    """An engine stepped by hand, with our cache watching it, or as released."""

    def __init__(self, engine, *, ours: bool = True, keeps_generated: bool = False):
        from megatron.core.inference.coordinator.runtime.engine_cache import EngineCache

        self.engine = engine
        self.cache = EngineCache(engine.context, keeps_generated=keeps_generated) if ours else None
        self.answers: dict[int, list[int]] = {}
        self._epoch = 0

    def add(self, prompt, salt: int = 0, **sampling) -> int:
        request_id = next(self.engine.request_counter)
        self.engine.add_request(request_id, prompt, SamplingParams(**(GREEDY | sampling)))
        if self.cache is not None:
            self.cache.take(self.engine.get_request(request_id), salt)
        return request_id

    def step(self) -> None:
        for record in self.engine.step_modern()["finished_request_records"]:
            self.answers[record.request_id] = list(record.merge().generated_tokens)
            if self.cache is not None:
                self.cache.leave(record.request_id)

    def run(self) -> None:
        while self.engine.has_unfinished_requests():
            self.step()

    def ask(self, prompt, salt: int = 0) -> list[int]:
        request_id = self.add(prompt, salt)
        self.run()
        return self.answers[request_id]

    def update(self) -> None:
        """A new epoch begins; the weights were changed by the caller."""
        self._epoch += 1
        if self.cache is not None:
            self.cache.begin_epoch(self.engine, self._epoch)


@pytest.fixture
def new_weights(built_in_model):
    """`with new_weights():` or `new_weights.enter_context(...)`: other weights, until the end."""
    before = {name: p.detach().clone() for name, p in built_in_model.named_parameters()}

    def change() -> None:
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in built_in_model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += 0.3 * parameter.std().nan_to_num(0.0) * noise

    yield change
    with torch.no_grad():
        for name, parameter in built_in_model.named_parameters():
            parameter.copy_(before[name])


def suspended(engine, mode: str):
    """What a suspend and a resume do to an engine that is stepped by hand."""

    @contextlib.contextmanager
    def around():
        engine.suspend()
        yield
        engine.resume()

    return around() if mode else contextlib.nullcontext()


# --- salted prefixes -----------------------------------------------------------------------------


@pytest.mark.parametrize("keeps_generated", [False, True])
def test_only_requests_with_the_same_salt_find_each_others_blocks(
    keeps_generated, cpu_engine, recomputed
):
    rig = Rig(cpu_engine(), keeps_generated=keeps_generated)
    skipped = []
    history = list(PROMPT)
    for salt in (0, 7, 2**63 - 1, 7, 0):
        before = rig.engine._prefill_tokens_skipped
        answer = rig.ask(PROMPT, salt)
        assert answer == recomputed(PROMPT, answer)
        skipped.append(rig.engine._prefill_tokens_skipped - before)
        history = PROMPT + answer
    full = len(PROMPT) // BLOCK * BLOCK
    assert skipped == [0, 0, 0, full, full]
    before = rig.engine._prefill_tokens_skipped
    rig.ask(history + list(b" and of"), 5)
    assert rig.engine._prefill_tokens_skipped == before


def test_events_name_the_hashes_that_a_client_with_the_salt_routes_by(cpu_engine, new_weights):
    rig = Rig(cpu_engine())
    rig.ask(PROMPT, 7)
    told = rig.cache.events().events[HASH_BYTES:]  # behind what says that all was cleared
    assert told == packed_block_hashes(PROMPT, BLOCK, 7)
    assert told != packed_block_hashes(PROMPT, BLOCK)
    new_weights()
    rig.update()
    rig.cache.events()
    rig.ask(PROMPT, 7)
    assert rig.cache.events().events == told


# --- weight updates ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["", "persist", "offload", "recompute"])
def test_cached_blocks_of_the_old_weights_are_not_reused(
    mode, cpu_engine, new_weights, recomputed, kv_mode
):
    rig = Rig(cpu_engine(**kv_mode(mode)))
    rig.ask(PROMPT)
    with suspended(rig.engine, mode):
        new_weights()
    rig.update()
    answer = rig.ask(PROMPT)
    assert answer == recomputed(PROMPT, answer)
    skipped = rig.engine._prefill_tokens_skipped
    assert rig.ask(PROMPT) == answer
    # The blocks of the new weights are reused.
    assert rig.engine._prefill_tokens_skipped - skipped == len(PROMPT) // BLOCK * BLOCK
    assert rig.cache.found == {}


@pytest.mark.parametrize("mode", ["", "persist", "offload"])
def test_control_the_released_engine_reuses_them(
    mode, cpu_engine, new_weights, recomputed, kv_mode
):
    rig = Rig(cpu_engine(**kv_mode(mode)), ours=False)
    rig.ask(PROMPT)
    with suspended(rig.engine, mode):
        new_weights()
    rig.update()
    answer = rig.ask(PROMPT)
    assert answer != recomputed(PROMPT, answer)


@pytest.mark.parametrize("ours", [True, False])
def test_a_request_that_waits_in_a_full_engine_is_computed_anew(
    ours, cpu_engine, new_weights, recomputed
):
    rig = Rig(cpu_engine(max_requests=4), ours=ours)
    rig.ask(PROMPT)
    for number in range(4):
        rig.add([65 + number] * 40, num_tokens_to_generate=30)
    waiting = rig.add(PROMPT)
    rig.step()
    assert list(rig.engine.waiting_request_ids) == [waiting]
    new_weights()
    rig.update()
    rig.run()
    answer = rig.answers[waiting]
    assert len(rig.answers) == 6  # nothing is lost
    assert (answer == recomputed(PROMPT, answer)) is ours


@pytest.mark.parametrize("ours", [True, False])
def test_a_prompt_half_way_through_chunked_prefill_leaves_nothing_behind(
    ours, cpu_engine, new_weights, recomputed
):
    """Its first chunk is KV of the old weights: the next request must not find it."""
    long = [32 + (7 * i) % 90 for i in range(400)]
    rig = Rig(cpu_engine(enable_chunked_prefill=True, max_tokens=128, max_requests=4), ours=ours)
    split = rig.add(long)
    rig.step()
    assert 0 < rig.engine.get_request(split).finished_chunk_token_count < len(long)
    new_weights()
    rig.update()
    rig.run()
    assert len(rig.answers[split]) == 8
    answer = rig.ask(long)
    assert (answer == recomputed(long, answer)) is ours


def test_requests_that_wait_while_the_engine_is_suspended_are_rekeyed(
    cpu_engine, new_weights, recomputed
):
    rig = Rig(cpu_engine(max_requests=4))
    rig.ask(PROMPT)
    for number in range(4):
        rig.add([65 + number] * 40, num_tokens_to_generate=30)
    waiting = rig.add(PROMPT)
    rig.step()
    rig.engine.suspend()
    new_weights()
    rig.update()
    rig.engine.resume()
    rig.run()
    assert rig.answers[waiting] == recomputed(PROMPT, rig.answers[waiting])


class Wire:
    """A link that brings what it is given, in one drain."""

    def __init__(self, *messages):
        from megatron.core.inference.coordinator.runtime import wire

        self.waiting = [wire.encode(message) for message in messages]

    def check(self) -> None:
        """It is always there."""

    def drain(self) -> list:
        taken, self.waiting = self.waiting, []
        return taken

    def send(self, message) -> None:
        """Nobody listens."""


def drained(rig: Rig, *messages) -> None:
    """Let the engine take these messages in one drain."""
    from megatron.core.inference.coordinator.runtime import engine_step
    from megatron.core.inference.coordinator.runtime.engine_end import EngineEnd

    end = rig.engine._prefix_routing = EngineEnd(rig.cache)
    end.link = Wire(*messages)
    engine_step.schedule_requests(rig.engine)


def submitted(request_id: int):
    from megatron.core.inference.coordinator import messages as m
    from megatron.core.inference.coordinator.runtime import wire

    return m.EngineRequest(request_id, 0, wire.pack(GREEDY), wire.pack(PROMPT))


@pytest.mark.parametrize("first", ["request", "update"])
@pytest.mark.parametrize("ours", [True, False])
def test_a_request_sent_in_the_same_drain_as_the_update_is_computed_anew(
    ours, first, cpu_engine, new_weights, recomputed
):
    """The control tells the engine the same, and its cache nothing, as the released one does."""
    from megatron.core.inference.coordinator import messages as m
    from megatron.core.inference.coordinator.lifecycle import Signal

    rig = Rig(cpu_engine())
    rig.ask(PROMPT)
    new_weights()
    update = m.Control(Signal.SET_GENERATION_EPOCH, (7, 1 if ours else 0))
    messages = [submitted(1000), update] if first == "request" else [update, submitted(1000)]
    drained(rig, *messages)
    rig.run()
    answer = rig.answers[1000]
    assert (answer == recomputed(PROMPT, answer)) is ours


@pytest.mark.parametrize("ours", [True, False])
def test_a_rank_that_joins_after_the_update_reuses_nothing_from_before(
    ours, cpu_engine, new_weights, recomputed
):
    from megatron.core.inference.coordinator import messages as m
    from megatron.core.inference.coordinator.lifecycle import FleetState

    rig = Rig(cpu_engine())
    rig.ask(PROMPT)
    new_weights()
    acknowledgement = m.RegisterAck(1, 1, 3 if ours else 0, FleetState.RUNNING)
    drained(rig, acknowledgement, submitted(1000))
    rig.run()
    answer = rig.answers[1000]
    assert (answer == recomputed(PROMPT, answer)) is ours


@pytest.fixture
def kv_mode():
    from megatron.core.inference.config import KVCacheManagementMode

    return lambda mode: {"kv_cache_management_mode": KVCacheManagementMode(mode)} if mode else {}


# --- generated tokens ------------------------------------------------------------------------


def skipped_in_the_next_turn(rig: Rig, prompt: list[int], answer: list[int]) -> tuple[int, list]:
    """Ask once more with the answer in the history; what was skipped, and the new answer."""
    context = rig.engine.context
    history = prompt + answer + list(b" And what came then?")
    before = rig.engine._prefill_tokens_skipped + context.prefix_cache_prefill_skipped_tokens
    following = rig.ask(history)
    after = rig.engine._prefill_tokens_skipped + context.prefix_cache_prefill_skipped_tokens
    return after - before, [history, following]


@pytest.mark.parametrize("length", [70, 64, 79, 81])
def test_a_generated_answer_is_not_computed_again(length, cpu_engine, recomputed):
    """Full blocks of prompt and answer are found; the answers stay those of a full recompute."""
    prompt, count = PROMPT[:length] + [33] * max(0, length - len(PROMPT)), 40
    skipped = {}
    for keeps in (False, True):
        rig = Rig(cpu_engine(), keeps_generated=keeps)
        request_id = rig.add(prompt, num_tokens_to_generate=count)
        rig.run()
        answer = rig.answers[request_id]
        skipped[keeps], (history, following) = skipped_in_the_next_turn(rig, prompt, answer)
        assert following == recomputed(history, following)
    # The last token that was generated has no KV: it was sampled and never fed.
    assert skipped == {
        False: length // BLOCK * BLOCK,
        True: (length + count - 1) // BLOCK * BLOCK,
    }


def test_generated_tokens_of_old_weights_are_not_kept(cpu_engine, new_weights, recomputed):
    rig = Rig(cpu_engine(), keeps_generated=True)
    request_id = rig.add(PROMPT, num_tokens_to_generate=60)
    for _ in range(20):
        rig.step()
    new_weights()
    rig.update()
    rig.run()
    skipped, (history, following) = skipped_in_the_next_turn(rig, PROMPT, rig.answers[request_id])
    assert skipped == 0
    assert following == recomputed(history, following)


@pytest.mark.parametrize("keeps_generated", [False, True])
def test_random_conversations_give_the_answers_of_a_full_recompute(
    keeps_generated, cpu_engine, recomputed
):
    """Several at once, in a cache that is too small for them, turn after turn."""
    source = random.Random(11)
    rig = Rig(
        cpu_engine(buffer_size_gb=64 * BLOCK * 8192 / 2**30, max_requests=8),
        keeps_generated=keeps_generated,
    )
    histories = [[source.randrange(32, 120) for _ in range(30 + 9 * n)] for n in range(5)]
    for _ in range(4):
        ids = {rig.add(h, num_tokens_to_generate=12): n for n, h in enumerate(histories)}
        rig.run()
        for request_id, n in ids.items():
            answer = rig.answers[request_id]
            assert answer == recomputed(histories[n], answer)
            addition = [source.randrange(32, 120) for _ in range(source.randrange(5, 25))]
            histories[n] = histories[n] + answer + addition


@pytest.fixture
def _room_is_made(monkeypatch):
    """Paused requests go on where cached blocks can be evicted, as `patch` sees to."""
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext

    from megatron.core.inference.coordinator.runtime import engine_mending

    ours = engine_mending.resume_paused_requests
    monkeypatch.setattr(DynamicInferenceContext, "resume_paused_requests", ours)


def dangling(allocator, family) -> list[int]:
    """Registered blocks that extend one that is not: a look-up of such a block ends the engine."""
    registered = allocator.kv_hash_to_block_id
    parents = {family.parent_of[key] for key in registered}
    return [parent for parent in parents if parent and parent not in registered]


@pytest.mark.usefixtures("_room_is_made")
@pytest.mark.parametrize("mode", ["", "persist", "offload", "recompute"])
@pytest.mark.parametrize("chunked", [False, True])
def test_no_block_is_registered_without_its_ancestors(
    mode, chunked, cpu_engine, kv_mode, recomputed
):
    """Conversations in a cache that is too small, with preemptions, suspends and epochs."""
    source = random.Random(7)
    engine = cpu_engine(
        buffer_size_gb=31 * BLOCK * 8192 / 2**30,
        max_requests=8,
        enable_chunked_prefill=chunked,
        **({"max_tokens": 64} if chunked else {}),
        **kv_mode(mode),
    )
    rig, allocator = Rig(engine, keeps_generated=True), engine.context.kv_block_allocator
    family = Family(allocator)
    listener = Listener(Family(allocator, lambda: rig._epoch))
    histories = [[source.randrange(32, 120) for _ in range(36)] for _ in range(6)]
    for turn in range(3):
        ids = {rig.add(h, num_tokens_to_generate=100): n for n, h in enumerate(histories)}
        step, interrupted = 0, source.randrange(20, 90)
        while engine.has_unfinished_requests():
            rig.step()
            step += 1
            if step == interrupted:
                with suspended(engine, mode):
                    pass
                rig.update()
            listener.hear(rig.cache.events())
            assert dangling(allocator, family) == [], f"turn {turn}, step {step}"
            assert listener.held <= table(rig)
        for request_id, n in ids.items():
            answer = rig.answers[request_id]
            assert answer == recomputed(histories[n], answer)
            histories[n] = (histories[n] + answer)[: source.randrange(20, 150)] + [33] * 5
    assert engine.evicted_request_count > 3
    assert rig.cache.found == {}


@pytest.mark.usefixtures("_room_is_made")
def test_what_a_preempted_or_resumed_request_generated_is_found_as_well(
    cpu_engine, kv_mode, recomputed
):
    rig = Rig(cpu_engine(**kv_mode("recompute")), keeps_generated=True)
    request_id = rig.add(PROMPT, num_tokens_to_generate=60)
    for _ in range(30):
        rig.step()
    with suspended(rig.engine, "recompute"):
        pass
    rig.update()
    rig.run()
    skipped, (history, following) = skipped_in_the_next_turn(rig, PROMPT, rig.answers[request_id])
    assert skipped == (len(PROMPT) + 59) // BLOCK * BLOCK
    assert following == recomputed(history, following)


# --- requests of others, and other starts --------------------------------------------------------


def test_an_engine_that_starts_again_is_watched_once_and_tells_its_new_watcher(cpu_engine):
    engine = cpu_engine()
    old = Rig(engine)
    old.cache.events()
    rigs = [Rig(engine, keeps_generated=n % 2 == 1) for n in range(5)]
    calls = []
    family = Family(engine.context.kv_block_allocator)
    listener = Listener(family)
    register = engine.context.kv_block_allocator.register_kv_block_hashes
    engine.context.kv_block_allocator.register_kv_block_hashes = lambda *args: (
        calls.append(args),
        register(*args),
    )
    rigs[-1].ask(PROMPT)
    listener.hear(rigs[-1].cache.events())
    assert listener.held == table(rigs[-1]) != set()
    assert old.cache.events() is None
    assert len(calls) == 1


def test_requests_past_the_coordinator_leave_nothing_behind(cpu_engine, generate):
    """`generate` without a coordinator: nobody takes a request and nobody says that it left."""
    rig = Rig(cpu_engine(), keeps_generated=True)
    generate(rig.engine, [PROMPT, PROMPT[:40]], 3)
    rig.engine.add_request(7, PROMPT, SamplingParams(**GREEDY))
    rig.update()
    rig.run()
    assert rig.cache.found == {}


@pytest.mark.parametrize("chunked", [False, True])
def test_a_request_s_event_number_is_that_of_its_first_chunk(chunked, cpu_engine):
    """Its own chunks are no change of the cache that a prediction could have missed."""
    fields = {"enable_chunked_prefill": True, "max_tokens": 128, "max_requests": 4}
    rig = Rig(cpu_engine(**(fields if chunked else {})))
    seen = rig.cache.events().count
    request_id = rig.add([32 + (7 * i) % 90 for i in range(400)])
    found = rig.cache.found[request_id]
    while rig.engine.has_unfinished_requests():
        rig.step()
        rig.cache.events()
    assert found.event_number == seen


# --- tensors of inference mode -------------------------------------------------------------------


def captured(engine) -> None:
    """What the capture of each CUDA graph ends with."""
    with torch.inference_mode():
        engine.context.reset()


def test_a_cache_of_inference_tensors_begins_an_epoch_outside_that_mode(cpu_engine, generate):
    engine = cpu_engine()
    captured(engine)
    assert engine.context.kv_block_allocator.block_bag.is_inference()
    generate(engine, [PROMPT], 3)
    rig = Rig(engine)  # drops what is cached
    assert table(rig) == set()
    rig.ask(PROMPT)
    assert table(rig)
    rig.update()
    assert table(rig) == set()


# --- events --------------------------------------------------------------------------------------


def table(rig: Rig) -> set[int]:
    """The block hashes that the engine would find now."""
    return set(rekeyed(list(rig.engine.context.kv_block_allocator.kv_hash_to_block_id), rig._epoch))


class Family:
    """The parent of every block that was ever registered with an allocator; 0: none."""

    def __init__(self, allocator, epoch=lambda: 0):
        self.parent_of: dict[int, int] = {}
        register = allocator.register_kv_block_hashes

        def register_and_note(block_ids, keys, parents=None):
            register(block_ids, keys, parents)
            blocks, before = rekeyed(keys, epoch()), rekeyed(parents, epoch())
            self.parent_of |= dict(zip(blocks, before, strict=True))

        allocator.register_kv_block_hashes = register_and_note


class Listener:
    """What somebody who hears the events believes; all that they promise is checked.

    Args:
        family: Whose blocks they are.
    """

    def __init__(self, family: Family):
        self.held: set[int] = set()
        self.next = 0
        self._parent_of = family.parent_of

    def hear(self, message) -> list[list[int]]:
        """Take a batch; returns its segments, those of removed blocks with a minus."""
        if message is None:
            return []
        assert message.events[:8] == bytes(8) or message.first == self.next
        self.next = message.first + message.count
        return self.apply(message.events, message.count)

    def apply(self, packed: bytes, count: int) -> list[list[int]]:
        heard = []
        for change, part in segments(packed, count):
            blocks = np.frombuffer(part, "<i8").tolist()
            if change is Change.CLEARED:
                self.held.clear()
            else:
                self._check_chain(blocks)
                self._store(blocks) if change is Change.STORED else self._remove(blocks)
            heard.append([change * block for block in blocks])
        return heard

    def _check_chain(self, blocks: list[int]) -> None:
        for before, block in pairwise(blocks):
            assert self._parent_of[block] == before, "it does not extend the block before it"

    def _store(self, chain: list[int]) -> None:
        assert self.held.isdisjoint(chain), "stored twice"
        assert self._parent_of[chain[0]] in self.held | {0}, "stored before its parent"
        self.held.update(chain)

    def _remove(self, tail: list[int]) -> None:
        assert self.held.issuperset(tail), "it was not there"
        self.held.difference_update(tail)
        left_behind = {self._parent_of[block] for block in self.held}.intersection(tail)
        assert not left_behind, "something extends it still"


@pytest.mark.parametrize("eviction", ["lru", "ref_zero"])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("keeps_generated", [False, True])
def test_events_tell_the_engines_table_whatever_happens(
    eviction, chunked, keeps_generated, cpu_engine
):
    """A small cache under random load, with epochs, resets and resynchronisations in between."""
    from megatron.core.inference.config import PrefixCachingEvictionPolicy

    engine = cpu_engine(
        buffer_size_gb=61 * BLOCK * 8192 / 2**30,
        max_requests=8,
        enable_chunked_prefill=chunked,
        prefix_caching_eviction_policy=PrefixCachingEvictionPolicy(eviction),
        **({"max_tokens": 96} if chunked else {}),
    )
    rig = Rig(engine, keeps_generated=keeps_generated)
    family = Family(engine.context.kv_block_allocator, lambda: rig._epoch)
    listener, source = Listener(family), random.Random(3)
    roots = [[source.randrange(32, 120) for _ in range(80)] for _ in range(4)]
    for round_ in range(60):
        if len(engine.requests) < 4:
            prompt = source.choice(roots)[: source.randrange(10, 80)]
            prompt = prompt + [source.randrange(32, 120) for _ in range(source.randrange(60))]
            rig.add(prompt, num_tokens_to_generate=source.randrange(1, 25))
        rig.step()
        listener.hear(rig.cache.events())
        assert listener.held == table(rig), f"round {round_}"
        if round_ % 20 == 19:
            rig.run()
            listener.hear(rig.cache.events())
            rig.update()
            listener.hear(rig.cache.events())
            assert listener.held == table(rig) == set()
        if round_ % 15 == 14:
            rig.cache.resync()
            listener.hear(rig.cache.events())
            assert listener.held == table(rig)
    rig.run()
    engine.reset()
    listener.hear(rig.cache.events())
    assert listener.held == set()


def test_a_block_is_told_after_the_forward_pass_that_computes_it(cpu_engine):
    rig = Rig(cpu_engine())
    rig.cache.events()
    rig.add(PROMPT)
    rig.engine.schedule_waiting_requests()
    assert table(rig)  # registered at scheduling
    assert rig.cache.events() is None
    rig.step()
    assert rig.cache.events().count == len(PROMPT) // BLOCK


def test_a_listener_that_was_there_before_still_hears(cpu_engine):
    from megatron.core.inference.config import PrefixCachingEvictionPolicy

    engine = cpu_engine(prefix_caching_eviction_policy=PrefixCachingEvictionPolicy.REF_ZERO)
    heard = []
    engine.context.kv_block_allocator.on_blocks_deregistered = lambda ids, keys: heard.append(keys)
    Rig(engine).ask(PROMPT)
    assert set().union(*heard)


# --- hybrid models -------------------------------------------------------------------------------


@pytest.fixture
def hybrid_context(built_in_model):
    """`hybrid_context(gigabytes)`: a context of a hybrid model, with a cache of Mamba states."""
    from megatron.core.inference.config import (
        InferenceConfig,
        KVCacheManagementMode,
        MambaInferenceStateConfig,
        PrefixCachingEvictionPolicy,
    )
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
    from megatron.core.utils import get_model_config

    states = MambaInferenceStateConfig(
        layer_type_list=["M", "*", "M", "*"],
        conv_states_shape=(8, 4),
        ssm_states_shape=(2, 4, 8),
        conv_states_dtype=torch.float32,
        ssm_states_dtype=torch.float32,
        mamba_chunk_size=BLOCK,
    )

    def make(gigabytes: float | None):
        config = InferenceConfig(
            block_size_tokens=BLOCK,
            buffer_size_gb=0.02,
            max_requests=8,
            max_tokens=256,
            max_sequence_length=256,
            enable_prefix_caching=True,
            prefix_caching_eviction_policy=PrefixCachingEvictionPolicy.LRU,
            prefix_caching_mamba_gb=gigabytes,
            mamba_inference_state_config=states,
            kv_cache_management_mode=KVCacheManagementMode.RECOMPUTE,
        )
        return DynamicInferenceContext(get_model_config(built_in_model), config)

    return make


def test_the_cache_of_mamba_states_keeps_its_place_and_removals_are_told(hybrid_context):
    """It takes the allocator's only slot for a listener anew at each resume that recomputes."""
    from megatron.core.inference.coordinator.runtime.kv_reporter import KvReporter

    context = hybrid_context(0.001)
    allocator = context.kv_block_allocator
    listener = allocator.on_blocks_deregistered
    reporter = KvReporter(context)
    assert allocator.on_blocks_deregistered == listener
    for keys in ([11, 12, 13], [21, 22, 23]):
        ids = allocator.allocate_memory_blocks(3)
        allocator.register_kv_block_hashes(ids.tolist(), keys, [0, *keys[:-1]])
        context.step_count += 1
        allocator.release_memory_blocks(ids)
        told = np.frombuffer(reporter.flush().events, "<i8").tolist()
        assert told == [CLEARED, *keys]
        allocator.evict_lru_blocks(2)
        told = np.frombuffer(reporter.flush().events, "<i8").tolist()
        assert told == [-keys[1], -keys[2]]
        context.deallocate_inference_state_buffers()
        context.reinitialize_inference_state_buffers()


@pytest.mark.parametrize(("gigabytes", "spares"), [(0.001, True), (None, False)])
def test_blocks_of_a_hybrid_model_without_its_states_spare_nothing(
    gigabytes, spares, hybrid_context
):
    from megatron.core.inference.coordinator.runtime.engine_cache import EngineCache

    cache = EngineCache(hybrid_context(gigabytes))
    assert cache.spares_prefill is spares
    assert (cache.events() is not None) is spares


def test_mamba_states_without_a_slot_are_left_out_and_the_last_blocks_come_first(
    hybrid_context, monkeypatch
):
    from megatron.core.inference.coordinator.runtime import engine_mending

    slots = hybrid_context(0.001).mamba_slot_allocator
    references = slots.context.kv_block_allocator.block_ref_counts
    references[:20] = 1
    slots.free_count = 0
    slots.block_to_slot[:5] = torch.arange(5)  # all in use
    with pytest.raises(RuntimeError, match="No evictable"):
        slots.allocate_slots_batch([10])
    collected = [10, 11, 3], [0, 1, 2], [12, 13], [0, 1], [110, 111, 103, 112, 113]
    monkeypatch.setattr(engine_mending, "_released_collect", lambda self: collected)
    assert engine_mending.collect_commit_data(slots) == ([3], [2], [], [], [103])
    slots.block_to_slot[[30, 31]] = torch.tensor([5, 6], dtype=torch.int32)  # idle
    kept = engine_mending.collect_commit_data(slots)
    assert kept == ([3], [2], [12, 13], [0, 1], [103, 112, 113])
    slots.free_count = 1
    kept = engine_mending.collect_commit_data(slots)
    assert kept == ([11, 3], [1, 2], [12, 13], [0, 1], [111, 103, 112, 113])
    slots.allocate_slots_batch(kept[0] + kept[2])
    monkeypatch.setattr(engine_mending, "_released_collect", lambda self: None)
    assert engine_mending.collect_commit_data(slots) is None


# --- chains --------------------------------------------------------------------------------------


@dataclass(eq=False)
class Running:
    """A request that holds blocks.

    Attributes:
        keys: Of all its blocks.
        epoch: Weight epoch of these keys.
        ids: The allocator's numbers of the blocks that it holds, its first ones.
    """

    keys: list[int]
    epoch: int
    ids: list[int]


class Cache:
    """The real allocator, used as the engine uses it, with our reporter watching.

    A block is one token here.

    Args:
        eviction: The allocator's policy.
        ahead: Whether a step is prepared before the one before it is through.
        blocks: How many there are.

    Attributes:
        told: The blocks that were told stored, and not told removed.
    """

    def __init__(self, eviction: str = "lru", *, ahead: bool = False, blocks: int = 40):
        from megatron.core.inference.config import AsyncScheduleMode, PrefixCachingEvictionPolicy
        from megatron.core.inference.contexts.kv_block_allocator import KVBlockAllocator

        mode = AsyncScheduleMode.ASYNC if ahead else AsyncScheduleMode.LEGACY
        self.context = SimpleNamespace(
            step_count=0, prefix_cache_lru_clock=0, config=SimpleNamespace(async_sched_mode=mode)
        )
        policy = PrefixCachingEvictionPolicy(eviction)
        self.allocator = KVBlockAllocator(self.context, blocks + 1, 0, True, policy)
        self.allocator.on_blocks_deregistered = self._note_gone
        self.context.kv_block_allocator = self.allocator
        self.running: list[Running] = []
        self.told: set[int] = set()
        self._steps_ahead = int(ahead)
        self._registered_at: dict[int, tuple[int, int]] = {}  # key -> epoch, step
        self.family = Family(self.allocator, lambda: self.reporter.key_epoch)
        self.watch()

    def watch(self) -> None:
        from megatron.core.inference.coordinator.runtime.kv_reporter import KvReporter

        self.reporter = KvReporter(self.context)

    def schedule(self, prompt: list[int], blocks: int | None = None) -> Running:
        """Start a request, with its first `blocks` blocks."""
        epoch = self.reporter.epoch
        request = Running(rekeyed(block_hashes(prompt, 1), epoch), epoch, [])
        self.running.append(request)
        self.go_on(request, len(prompt) if blocks is None else blocks)
        return request

    def go_on(self, request: Running, blocks: int) -> None:
        """Schedule the next chunk: look up, pin, allocate and register, as `add_request` does."""
        wanted = request.keys[len(request.ids) :][:blocks]
        table = self.allocator.kv_hash_to_block_id
        matched = [table[key] for key in wanted if key in table]
        assert all(key in table for key in wanted[: len(matched)]), "a block without its parent"
        pins = torch.tensor(matched, dtype=torch.int32)
        self.allocator.block_ref_counts[pins] += 1
        self.allocator.update_timestamps(pins)
        new = self.allocator.allocate_memory_blocks(len(wanted) - len(matched))
        if new is None:
            self.allocator.block_ref_counts[pins] -= 1
            return
        first = len(request.ids) + len(matched)
        request.ids += [*matched, *new.tolist()]
        keys, parents = request.keys[first : len(request.ids)], [0, *request.keys][first:]
        self.reporter.key_epoch = request.epoch
        self.allocator.register_kv_block_hashes(new.tolist(), keys, parents[: len(keys)])
        self._registered_at |= dict.fromkeys(keys, (request.epoch, self.context.step_count))

    def finish(self, request: Running) -> None:
        self.running.remove(request)
        self.allocator.release_memory_blocks(torch.tensor(request.ids, dtype=torch.int32))

    def step(self) -> None:
        self.context.step_count += 1
        self.context.prefix_cache_lru_clock += 1

    def begin_epoch(self) -> None:
        self.reporter.begin_epoch(self.reporter.epoch + 1)
        self.told.clear()

    def reset(self) -> None:
        self.running.clear()
        self.allocator.reset()
        self.context.step_count = 0
        self.told.clear()

    def flush(self):
        message = self.reporter.flush()
        self.told = self.table()
        return message

    def table(self) -> set[int]:
        """The blocks that are computed, and of the present weights."""
        through = self.context.step_count - self._steps_ahead
        held = [
            key
            for key in self.allocator.kv_hash_to_block_id
            if self._registered_at[key][0] == self.reporter.epoch
            and self._registered_at[key][1] < through
        ]
        return set(rekeyed(held, self.reporter.epoch))

    def _note_gone(self, block_ids: list[int], keys: set[int]) -> None:
        self.told.difference_update(rekeyed(list(keys), self.reporter.epoch))


class Walk:
    """Random steps of a cache and of a listener, compared after each flush.

    Attributes:
        seen: How often each kind of segment, and a break, was heard.
    """

    def __init__(self, seed: int, **fields):
        self.source = random.Random(seed)
        self.cache = Cache(**fields)
        self.listener = Listener(self.cache.family)
        self.seen: Counter = Counter()
        self._scheduled: list[tuple[int, set[int]]] = []  # event number, what was told by then

    def run(self, steps: int) -> None:
        actions = [self.schedule] * 5 + [self.go_on, self.finish, self.step] * 3
        actions += [self.flush] * 2 + [self.evict] * 2
        for _ in range(steps):
            self.source.choice(actions)()
            if self.source.random() < 0.02:
                self.source.choice([self.begin_epoch, self.reset, self.resync])()
        self.flush()

    def schedule(self) -> None:
        self._scheduled.append((self.cache.reporter.event_number, set(self.cache.told)))
        prompt = [self.source.choice([1, 1, 1, 2, 3]) for _ in range(self.source.randrange(1, 12))]
        self.cache.schedule(prompt, self.source.choice([None, None, 1, 3]))

    def go_on(self) -> None:
        if self.cache.running:
            self.cache.go_on(self.source.choice(self.cache.running), self.source.randrange(1, 6))

    def finish(self) -> None:
        if self.cache.running:
            self.cache.finish(self.source.choice(self.cache.running))

    def step(self) -> None:
        self.cache.step()
        if self.source.random() < 0.8:
            self.flush()

    def evict(self) -> None:
        if self.cache.allocator.prefix_caching_eviction_policy.value == "lru":
            evictable = int(self.cache.allocator.get_evictable_block_count())
            self.cache.allocator.evict_lru_blocks(self.source.randrange(evictable + 1))

    def begin_epoch(self) -> None:
        self.cache.begin_epoch()
        self._scheduled.clear()

    def reset(self) -> None:
        self.cache.reset()
        self._scheduled.clear()

    def resync(self) -> None:
        self.cache.reporter.resync()
        self._scheduled.clear()

    def flush(self) -> None:
        message = self.cache.flush()
        if message is not None:
            self._check_numbers(message)
        for part in self.listener.hear(message):
            self.seen["cleared" if not part else "stored" if part[0] > 0 else "removed"] += 1
            self.seen["long"] += len(part) > 1
        if message is not None:
            events = np.frombuffer(message.events, "<i8")
            self.seen["break"] += int((events == BREAK).sum())
        assert self.listener.held == self.cache.table()
        self._scheduled.clear()

    def _check_numbers(self, message) -> None:
        """A request's event number cuts the events at what was told when it was scheduled."""
        for number, told in self._scheduled:
            before = Listener(self.cache.family)
            before.held |= self.listener.held
            count = number - message.first
            before.apply(message.events[: 8 * count], count)
            assert before.held == told
            self.seen["number"] += count > 0


@pytest.mark.parametrize("eviction", ["lru", "ref_zero"])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_a_listener_never_holds_a_block_without_its_parent(eviction, ahead, seed):
    """Whatever happens, and after every single segment."""
    walk = Walk(seed, eviction=eviction, ahead=ahead, blocks=30 + 10 * seed)
    walk.run(600)
    assert min(walk.seen[k] for k in ("stored", "removed", "break", "long", "number")) > 5
    assert walk.seen["cleared"] > 3


def hashed(*prompt: int) -> list[int]:
    return block_hashes(prompt, 1)


def events_of(cache: Cache) -> list[int]:
    message = cache.flush()
    return np.frombuffer(message.events, "<i8").tolist() if message is not None else []


def stored_by(cache: Cache, *prompts: list[int]) -> list[int]:
    """Run these prompts together in one step, and let them end; the events."""
    requests = [cache.schedule(prompt) for prompt in prompts]
    cache.step()
    events = events_of(cache)
    for request in requests:
        cache.finish(request)
    return events


def test_a_break_stands_where_a_chain_does_not_go_on():
    cache = Cache()
    one, two = hashed(1, 2, 3), hashed(7, 8)
    assert stored_by(cache, [1, 2, 3], [7, 8]) == [CLEARED, *one, BREAK, *two]
    # What goes on from an earlier batch is a chain of its own.
    assert stored_by(cache, [1, 2, 3, 4], [7, 9]) == [hashed(1, 2, 3, 4)[3], BREAK, hashed(7, 9)[1]]


def test_what_was_scheduled_in_pieces_is_told_in_one_chain():
    cache = Cache()
    request = cache.schedule([1, 2, 3, 4], 2)
    cache.schedule([7])
    cache.go_on(request, 2)
    cache.step()
    assert events_of(cache) == [CLEARED, *hashed(1, 2, 3, 4), BREAK, *hashed(7)]


def test_the_branches_of_a_block_are_removed_before_it_or_with_it():
    cache = Cache()
    stored_by(cache, [1, 2], [1, 3], [1, 3, 4], [1, 3, 5], [6])
    cache.allocator.evict_lru_blocks(6)
    p, x = hashed(1, 2)
    _, y, y4 = hashed(1, 3, 4)
    (*_, y5) = hashed(1, 3, 5)
    (six,) = hashed(6)
    assert events_of(cache) == [-six, BREAK, -y5, BREAK, -y, -y4, BREAK, -p, -x]


def test_the_order_in_which_blocks_are_deregistered_says_nothing():
    events = set()
    for seed in range(20):
        cache = Cache()
        stored_by(cache, [1, 2, 3], [1, 2, 4], [1, 5])
        keys = list(cache.allocator.kv_hash_to_block_id)
        random.Random(seed).shuffle(keys)
        cache.reporter._note_deregistered(keys)
        events.add(tuple(events_of(cache)))
    assert len(events) == 1


def test_a_change_between_stored_and_removed_needs_no_break():
    cache = Cache()
    stored_by(cache, [1, 2])
    cache.allocator.evict_lru_blocks(1)
    assert stored_by(cache, [5, 6]) == [-hashed(1, 2)[1], *hashed(5, 6)]


def test_one_deregistration_after_another_is_no_chain():
    """From the end of a chain to its root: the second does not extend the first."""
    cache = Cache()
    stored_by(cache, [1, 2, 3])
    cache.allocator.evict_lru_blocks(1)
    cache.allocator.evict_lru_blocks(2)
    one, two, three = hashed(1, 2, 3)
    assert events_of(cache) == [-three, BREAK, -one, -two]


def test_the_whole_table_is_told_in_as_few_chains_as_there_are_leaves():
    cache = Cache()
    stored_by(cache, [1, 2], [7])
    stored_by(cache, [1, 2, 3, 4], [1, 5])
    cache.reporter.resync()
    *_, five = hashed(1, 5)
    everything = [CLEARED, *hashed(1, 2, 3, 4), BREAK, *hashed(7), BREAK, five]
    assert events_of(cache) == everything
    # What is computed meanwhile goes on from what was told last, where it does.
    cache.reporter.resync()
    assert stored_by(cache, [1, 5, 6]) == [*everything, hashed(1, 5, 6)[2]]


def test_what_was_never_computed_is_told_neither_stored_nor_removed():
    cache = Cache("ref_zero")
    kept = cache.schedule([1, 2])
    cache.step()
    assert events_of(cache) == [CLEARED, *hashed(1, 2)]
    cache.finish(cache.schedule([1, 2, 3, 4]))
    cache.step()
    assert events_of(cache) == []
    cache.schedule([1, 2, 3])
    cache.finish(kept)
    assert events_of(cache) == []
    cache.step()
    assert events_of(cache) == [hashed(1, 2, 3)[2]]


def test_an_event_number_counts_the_breaks_before_it():
    cache = Cache()
    stored_by(cache, [1, 2], [7])
    assert cache.reporter.event_number == 5  # a clear, 2 blocks, a break, a block
    cache.allocator.evict_lru_blocks(1)
    assert cache.reporter.event_number == 6
    cache.allocator.evict_lru_blocks(1)
    assert cache.reporter.event_number == 8
    message = cache.flush()
    assert (message.first, message.count) == (5, 3)


def test_a_cache_that_was_used_before_it_was_watched_starts_empty():
    cache = Cache()
    stored_by(cache, [1, 2])
    used = cache.schedule([5, 6])
    cache.step()
    cache.watch()
    assert set(cache.allocator.kv_hash_to_block_id) == set(hashed(5, 6))
    # What extends a block that was never told has no place in a chain.
    assert stored_by(cache, [5, 6, 7], [1, 2]) == [CLEARED, *hashed(1, 2)]
    cache.finish(used)
    cache.allocator.evict_lru_blocks(5)
    one, two = hashed(1, 2)
    assert events_of(cache) == [-one, -two]
