"""Cache events and weight epochs on megatron-core's real engine.

Each test of a weight update has its control: the same on the engine as released, where KV of the
old weights is reused and the answer is wrong.
"""

import contextlib
import random

import pytest
import torch
from megatron.core.inference.sampling_params import SamplingParams

from megatron.core.inference.coordinator.hashing import rekeyed
from megatron.core.inference.coordinator.kv_events import unpack_events

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

    def add(self, prompt, **sampling) -> int:
        request_id = next(self.engine.request_counter)
        self.engine.add_request(request_id, prompt, SamplingParams(**(GREEDY | sampling)))
        if self.cache is not None:
            self.cache.take(self.engine.get_request(request_id))
        return request_id

    def step(self) -> None:
        for record in self.engine.step_modern()["finished_request_records"]:
            self.answers[record.request_id] = list(record.merge().generated_tokens)
            if self.cache is not None:
                self.cache.leave(record.request_id)

    def run(self) -> None:
        while self.engine.has_unfinished_requests():
            self.step()

    def ask(self, prompt) -> list[int]:
        request_id = self.add(prompt)
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


# --- events --------------------------------------------------------------------------------------


def table(rig: Rig) -> set[int]:
    """The block hashes that the engine would find now."""
    return set(rekeyed(list(rig.engine.context.kv_block_allocator.kv_hash_to_block_id), rig._epoch))


class Listener:
    """What somebody who hears the events believes."""

    def __init__(self):
        self.held: set[int] = set()
        self.next = 0

    def hear(self, message) -> None:
        if message is None:
            return
        events = unpack_events(message.events, message.count)
        assert events[0] == 0 or message.first == self.next
        self.next = message.first + len(events)
        for event in events:
            if event == 0:
                self.held.clear()
            elif event > 0:
                assert event not in self.held, "stored twice"
                self.held.add(event)
            else:
                self.held.remove(-event)


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
    listener, source = Listener(), random.Random(3)
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
