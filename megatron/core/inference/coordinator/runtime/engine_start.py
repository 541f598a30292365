"""Starting an engine under the coordinator: sockets, groups and registration.

`start_listening_to_data_parallel_coordinator` takes the place of the released engine's method
(`patching.py`).
"""

import asyncio
import hashlib
import logging
import os
import types
import uuid
from collections.abc import Coroutine, Generator
from dataclasses import fields, replace
from typing import Any

import torch
import zmq
from megatron.core.inference.config import InferenceConfig
from megatron.core.utils import get_asyncio_loop, get_pg_rank, get_pg_size, get_pg_src_rank

from megatron.core.inference.coordinator import messages as m
from megatron.core.inference.coordinator.lifecycle import FleetState
from megatron.core.inference.coordinator.runtime import keys
from megatron.core.inference.coordinator.runtime.addresses import job_address, machine
from megatron.core.inference.coordinator.runtime.engine_cache import EngineCache
from megatron.core.inference.coordinator.runtime.engine_end import EngineEnd
from megatron.core.inference.coordinator.runtime.group_channel import GroupLeader, GroupMember
from megatron.core.inference.coordinator.runtime.group_votes import GroupVotes
from megatron.core.inference.coordinator.runtime.link import GRACE_SECONDS, CoordinatorLink
from megatron.core.inference.coordinator.runtime.process import (
    CoordinatorDied,
    CoordinatorProcess,
    ProcessSettings,
)
from megatron.core.inference.coordinator.settings import (
    PROTOCOL_VERSION,
    AccessSettings,
    CoordinatorSettings,
    FleetSettings,
    RecordSettings,
    RoutingSettings,
    SettingsError,
    flag,
    unused_options,
)

logger = logging.getLogger(__name__)

RECONNECT_SECONDS = 300.0
"""How long a coordinator of another job may be out of reach before an engine gives it up."""

_REGISTER_SECONDS = 300.0
"""Until the last replica has registered; they come up together, but models load slowly."""


async def start_listening_to_data_parallel_coordinator(
    self: Any,
    inference_coordinator_port: int | None = None,
    launch_inference_coordinator: bool = True,
    *,
    hostname: str | None = None,
    coordinator_schedule_output_path: str | None = None,
    coordinator_address: str | None = None,
    loop: asyncio.AbstractEventLoop | None = None,
) -> str:
    """Start the coordinator where asked, register with it and begin the engine's loop.

    Every rank must call it: it uses blocking collectives.

    Args:
        self: The engine.
        inference_coordinator_port: Port of the coordinator; None or 0 lets the system choose. One
            that is in use is replaced with a warning, unless it came from the command line.
        launch_inference_coordinator: Whether the first rank starts the coordinator process.
        hostname: Address of the coordinator's machine that all ranks can reach. Ranks elsewhere
            are reached at the address on the way there; see `addresses.job_address`.
        coordinator_schedule_output_path: Where the coordinator writes its decisions once a second.
        coordinator_address: A coordinator that is there already, e.g. of
            `tools/run_coordinator.py`; then none is started.
        loop: Event loop to run the engine in.

    Returns:
        The coordinator's address.

    Raises:
        CoordinatorDied: It did not come up, or did not take the registration; says why.
    """
    end = self._prefix_routing = EngineEnd(_cache_of(self))
    machines = _gathered(machine(), torch.distributed.group.WORLD)
    host = end.host = job_address(hostname, alone=len(set(machines)) == 1)
    self.zmq_context = zmq.Context()
    self.zmq_sockets = []
    self._pending_signals.clear()
    groups = self.pg_collection
    self.is_mp_coordinator = get_pg_rank(groups.tp) == 0 and get_pg_rank(groups.pp) == 0
    self.is_dp_coordinator = self.is_mp_coordinator and get_pg_rank(groups.dp) == 0

    address = coordinator_address
    if address is None and not launch_inference_coordinator:
        address = f"tcp://{hostname or host}:{inference_coordinator_port}"
    ring, failure = None, None
    if address is not None:
        ring = keys.ring_to_join(address, access_settings())
    elif self.is_dp_coordinator:
        settings = _process_settings(
            self,
            end,
            hostname or host,
            inference_coordinator_port,
            coordinator_schedule_output_path,
        )
        try:
            address, ring = _start_coordinator(self, end, settings)
        except CoordinatorDied as error:
            failure = error
    job = f"{os.environ.get('TORCHELASTIC_RUN_ID', 'job')}-{uuid.uuid4().hex[:8]}"
    for group in (groups.dp, groups.mp):
        address, ring, job, failure = _from_first((address, ring, job, failure), group)
    if failure is not None:  # the same on every rank: none is left waiting for the first
        raise failure
    assert address is not None
    if ring is not None:
        keys.remember(address, ring)

    _join_group(self, end, host)
    joined = (0, FleetState.RUNNING, 0)
    if self.is_mp_coordinator:
        grace = RECONNECT_SECONDS if coordinator_address else GRACE_SECONDS
        credentials = None if ring is None else ring.credentials(keys.Role.ENGINE)
        joined = _register(self, end, address, job, grace, credentials)
    epoch, state, number = _from_first(joined, groups.mp)
    _seed_sampling(self, job, number)
    end.cache.begin_epoch(self, epoch)
    end.catch_up(self.state, state)
    _connect_barriers(self, host)
    self.engine_loop_task = get_asyncio_loop(loop).create_task(
        _run_in_inference_mode(self.run_engine_with_coordinator(loop=loop))
    )
    return address


async def _run_in_inference_mode(loop: Coroutine[Any, Any, None]) -> None:
    """The engine's loop, as upstream's tool runs it.

    Capturing CUDA graphs leaves the engine inference tensors that nobody may change outside that
    mode, and the released loop enters it for a forward pass only.
    """
    await _in_inference_mode(loop)


@types.coroutine
def _in_inference_mode(coroutine: Coroutine[Any, Any, None]) -> Generator[Any, Any, None]:
    """Run a coroutine in inference mode, which is the thread's, and leave it at every await.

    Otherwise what else runs on the event loop, a trainer for example, would be in it as well.
    """
    resume, argument = coroutine.send, None
    while True:
        with torch.inference_mode():
            try:
                awaited = resume(argument)
            except StopIteration:
                return
        try:
            resume, argument = coroutine.send, (yield awaited)
        except BaseException as error:
            resume, argument = coroutine.throw, error


def _start_coordinator(
    engine: Any, end: EngineEnd, settings: ProcessSettings
) -> tuple[str, keys.KeyRing | None]:
    """Start the coordinator process; returns its address and the keys of its peers."""
    end.process = CoordinatorProcess(settings, engine.controller.tokenizer)
    engine.inference_coordinator_process = end.process.process
    return end.process.address, None if settings.lock is None else settings.lock.ring


def _cache_of(engine: Any) -> EngineCache:
    keeps = routing_settings().generated_tokens
    if keeps and engine.num_speculative_tokens:
        raise SettingsError(
            "generated tokens cannot be kept with speculative decoding, whose drafts have KV as "
            f"well; leave out {flag('generated_tokens')}"
        )
    cache = EngineCache(engine.context, keeps_generated=keeps)
    if engine.context.enable_prefix_caching and not cache.spares_prefill:
        logger.warning(
            "prefix_caching_spares_nothing reason='a hybrid model needs its Mamba states as well, "
            "and none are kept' set='--inference-dynamic-batching-prefix-caching-mamba-gb'"
        )
    return cache


def _process_settings(
    engine: Any, end: EngineEnd, host: str, port: int | None, schedule_path: str | None
) -> ProcessSettings:
    context = engine.context
    core = CoordinatorSettings(
        routing=_routing_of(context),
        fleet=fleet_settings(),
        expected_ranks=get_pg_size(engine.pg_collection.dp),
        prefix_caching=end.cache.spares_prefill,
        block_size_tokens=context.block_size_tokens,
        max_requests=context.max_requests,
        eviction=context.prefix_caching_eviction_policy,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    lock = keys.make_lock(access_settings())
    parsed = _parsed_arguments()
    recording = RecordSettings.from_mapping(parsed)
    insists = port == parsed.get("inference_coordinator_port")
    return ProcessSettings(
        core, host, port or 0, schedule_path, recording, lock=lock, insists_on_port=insists
    )


_chosen_settings: RoutingSettings | None = None


def choose_settings(settings: RoutingSettings | None) -> None:
    """Fix the routing settings of coordinators started from now on; None leaves them open."""
    global _chosen_settings
    _chosen_settings = settings


def routing_settings() -> RoutingSettings:
    """The settings chosen in code, else Megatron's parsed arguments, else our defaults."""
    return _chosen_settings or RoutingSettings.from_mapping(_parsed_arguments())


def _routing_of(context: Any) -> RoutingSettings:
    """`routing_settings`, where they leave something open, with what the engine's config says.

    A dataclass does not tell its defaults from a choice, so only what differs from megatron-core's
    default counts.
    """
    settings, defaults = routing_settings(), RoutingSettings()
    if _chosen_settings is not None:
        return settings
    config = {f.name: f.default for f in fields(InferenceConfig)}
    in_code = {}
    for name in ("coordinator_policy", "routing_alpha"):
        field = f"prefix_caching_{name}"
        value = getattr(context, field)
        is_open = getattr(settings, name) == getattr(defaults, name)
        if is_open and value != config[field]:
            in_code[name] = value
    settings = replace(settings, **in_code)
    if "routing_alpha" in in_code:
        for note in unused_options(settings):
            logger.warning("option_unused %s", note)
    return settings


def fleet_settings() -> FleetSettings:
    """What Megatron's parsed arguments say, else our defaults."""
    return FleetSettings.from_mapping(_parsed_arguments())


def access_settings() -> AccessSettings:
    """What Megatron's parsed arguments say, else our defaults."""
    return AccessSettings.from_mapping(_parsed_arguments())


def _parsed_arguments() -> dict[str, Any]:
    try:
        from megatron.training.global_vars import get_args

        return vars(get_args())
    except (ImportError, AssertionError):  # no megatron.training, or no arguments were parsed
        return {}


def _from_first(value: tuple, group: Any) -> tuple:
    box = [value]
    torch.distributed.broadcast_object_list(box, src=get_pg_src_rank(group), group=group)
    return box[0]


def _gathered(value: Any, group: Any) -> list:
    """Every rank's value. Only for the time before the engine's loop begins: it blocks."""
    values: list = [value] * get_pg_size(group)
    if len(values) > 1:
        torch.distributed.all_gather_object(values, value, group=group)
    return values


def _channel(group: Any, host: str) -> GroupLeader | GroupMember | None:
    """This rank's end of a channel between the ranks of a group; None if it is alone there."""
    if get_pg_size(group) == 1:
        return None
    machines = _gathered(machine(), group)
    rank, leader = get_pg_rank(group), None
    if rank == 0:
        leader = GroupLeader(len(machines) - 1, host if len(set(machines)) > 1 else None)
    (invitation,) = _from_first((leader and leader.invitation,), group)
    if leader is None:
        return GroupMember(invitation, rank)
    leader.wait_for_members()
    return leader


def _join_group(engine: Any, end: EngineEnd, host: str) -> None:
    """Connect the ranks of a model-parallel group, if there is more than one."""
    channel = _channel(engine.pg_collection.mp, host)
    if isinstance(channel, GroupLeader):
        end.leader = channel
    else:
        end.member = channel
    if channel is not None:
        engine.zmq_sockets.append(channel)  # the released shutdown closes them


def _register(
    engine: Any,
    end: EngineEnd,
    address: str,
    job: str,
    grace: float,
    credentials: keys.Credentials | None,
) -> tuple[int, FleetState, int]:
    """Register; returns the fleet's weight epoch and state, and the rank's number there."""
    context, dp_rank = engine.context, get_pg_rank(engine.pg_collection.dp)
    check = end.process.check if end.process is not None else lambda: None
    end.link = CoordinatorLink(
        engine.zmq_context, address, f"engine-{job}-{dp_rank}".encode(), check, grace, credentials
    )
    end.registration = m.Register(
        version=PROTOCOL_VERSION,
        replica=job,
        dp_rank=dp_rank,
        weight_epoch=end.cache.epoch,
        max_requests=context.max_requests,
        block_size=context.block_size_tokens if end.cache.spares_prefill else 0,
        total_blocks=context.kv_block_allocator.total_count,
        eviction=context.prefix_caching_eviction_policy.value,
    )
    taken = end.link.register(end.registration, _REGISTER_SECONDS)
    end.generation = taken.generation
    return taken.weight_epoch, taken.state, taken.rank


def _seed_sampling(engine: Any, job: str, number: int) -> None:
    """Give the replica random numbers of its own, the same on all of its ranks.

    megatron-core counts from the rank within the job: two jobs would draw the same samples, and
    so would a job that is started again. To be repeated, a run counts from the rank's number in
    the fleet.

    Args:
        engine: The engine.
        job: This job's name, which no other start has.
        number: The replica's rank in the fleet.
    """
    controller = engine.controller
    if not engine.context.config.offset_sampling_seed_by_dp_rank:
        return  # all replicas are meant to draw alike
    name: Any = (job, get_pg_rank(engine.pg_collection.dp))
    if torch.are_deterministic_algorithms_enabled():
        name = number
    text = repr((controller.model_config.inference_sampling_seed, name))
    digest = hashlib.sha256(text.encode()).digest()
    controller.sampling_rng.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _connect_barriers(engine: Any, host: str) -> None:
    """The CPU-side reductions that the released loop uses for consensus and barriers."""
    engine.ep_rank = get_pg_rank(engine.pg_collection.ep)
    engine.ep_world_size = get_pg_size(engine.pg_collection.ep)
    engine._ep_consensus_loop_counter = 0
    engine._last_ep_consensus = (0, False)
    experts = _channel(engine.pg_collection.ep, host)
    if experts is not None:
        votes = GroupVotes(experts, engine.ep_world_size)
        engine.expert_parallel_zmq_communicator = votes
        engine.context.set_ep_zmq_communicator(votes)
    world = torch.distributed.group.WORLD
    everybody = _channel(world, host)
    if everybody is not None:
        engine.world_zmq_communicator = GroupVotes(everybody, get_pg_size(world))
