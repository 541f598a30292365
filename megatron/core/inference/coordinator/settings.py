"""Every option of the plugin, once: name, default, range and help.

The command-line flags (`arguments.py`), the tables in the README and the settings objects in code
all derive from `RoutingSettings` and `FleetSettings`.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from megatron.core.inference.config import (
    PrefixCachingCoordinatorPolicy,
    PrefixCachingEvictionPolicy,
)

from megatron.core.inference.coordinator.options import Option, Settings, SettingsError, about
from megatron.core.inference.coordinator.policies import PrefixCachingCostPolicy, routes_on_prefix

FLAG_PREFIX = "inference_dynamic_batching_prefix_caching_"
"""What the argparse dest of every routing option begins with; the flag is the dest with dashes."""

PROTOCOL_VERSION = 1
"""Version of the wire protocol (docs/architecture.md); CONNECT and REGISTER carry it."""


@dataclass(frozen=True, slots=True)
class RoutingSettings(Settings):
    """How requests are routed. Immutable and picklable.

    Raises:
        SettingsError: A value is out of its range, or names no policy.
    """

    PREFIX: ClassVar[str] = FLAG_PREFIX

    coordinator_policy: PrefixCachingCoordinatorPolicy = field(
        default=PrefixCachingCoordinatorPolicy.LONGEST_PREFIX,
        metadata=about(
            "What is known of a rank's cache: longest_prefix (how many of the prompt's blocks it "
            "holds, counted from the first), first_prefix_block (whether it holds the first "
            "block) or load_balanced (nothing: the least loaded rank gets the request).",
        ),
    )
    cost_policy: PrefixCachingCostPolicy = field(
        default=PrefixCachingCostPolicy.RELATIVE_LOAD_WEIGHTED,
        metadata=about(
            "How the cached share of a prompt is weighed against load: relative_load_weighted "
            "(fraction - beta * (load - mean) / max(1, mean)), free_capacity_weighted "
            "(alpha * fraction + (1 - alpha) * free places / max_requests), prefill_work "
            "(-(blocks not cached) * (1 + load)) or added_delay (-(queued + new + new * min(mean "
            "load, 64) * 3 / 16 + max(100, .22 * usual prompt) * (load + pausing / 2) + 5 * "
            "evicted), in tokens of prefill). The highest score wins. Where engines report their "
            "caches, as ours do, added_delay suits most traffic best, and it alone spreads "
            "sessions that share a system prompt over an idle fleet.",
        ),
    )
    load_beta: float = field(
        default=1.0,
        metadata=about(
            "Weight of load in relative_load_weighted. At 1 a rank at twice the mean load gives up "
            "the credit of one fully cached prompt; 0 ignores load.",
            minimum=0.0,
        ),
    )
    routing_alpha: float = field(
        default=0.5,
        metadata=about(
            "Weight of the cached share in free_capacity_weighted, against free places; no other "
            "cost policy reads it.",
            minimum=0.0,
            maximum=1.0,
        ),
    )
    ttl_seconds: float = field(
        default=300.0,
        metadata=about(
            "Seconds that a prompt is believed to stay cached after its routing or its answer, "
            "whichever is later, on engines with lru eviction that report no cache events.",
            minimum=0.001,
        ),
    )
    burst_cap: int = field(
        default=0,
        metadata=about(
            "Up to this many requests follow a request with the same full blocks that is still "
            "being computed, whatever the load; 0 leaves it to the cost policy.",
            minimum=0,
        ),
    )

    generated_tokens: bool = field(
        default=False,
        metadata=about(
            "Engines also keep the blocks that a request generated, so that the next turn does "
            "not compute the answer again; needs lru eviction.",
        ),
    )


@dataclass(frozen=True, slots=True)
class FleetSettings(Settings):
    """What is done when replicas are lost or busy. Immutable and picklable.

    Raises:
        SettingsError: A value is out of its range.
    """

    PREFIX: ClassVar[str] = "inference_coordinator_"

    max_retries: int = field(
        default=1,
        metadata=about(
            "How often a request is given to another replica after the one that had it was lost. "
            "One that comes back after all, because it or the link only stood still, does not "
            "count. For that its prompt is kept until the answer; 0 keeps none.",
            minimum=0,
        ),
    )
    retry_deadline: float = field(
        default=600.0,
        metadata=about(
            "Seconds after its arrival from which on a request whose replica is lost is answered "
            "with an error, however often it was tried.",
            minimum=0.0,
        ),
    )
    return_wait: float = field(
        default=3.0,
        metadata=about(
            "Seconds that a replica which cannot be reached may take to come back with the "
            "requests that it has, until it counts as lost and others get them.",
            minimum=0.0,
        ),
    )
    replica_wait: float = field(
        default=60.0,
        metadata=about(
            "Seconds that requests wait for a replica when none is left, until they are answered "
            "with an error.",
            minimum=0.0,
        ),
    )
    pause_wait: float = field(
        default=300.0,
        metadata=about(
            "Seconds that requests wait in a paused or suspended fleet once the client that did it "
            "is gone, until they are answered with an error, as are new ones (HTTP 503). Longer "
            "than a trainer takes to start again. The fleet stays paused until a client lets it "
            "run.",
            minimum=0.0,
        ),
    )
    hung_timeout: float = field(
        default=120.0,
        metadata=about(
            "Seconds without a sign of life after which a replica counts as lost although its "
            "connection stands. Longer than the longest step, e.g. a prefill; it does not run "
            "while the fleet is paused or suspended.",
            reason="replicas are asked for a sign of life once a second",
            minimum=3.0,
        ),
    )
    first_answer_timeout: float = field(
        default=600.0,
        metadata=about(
            "The same until a replica has completed a request: the first steps may compile kernels "
            "and capture graphs, which takes minutes. The hung timeout counts where it is longer.",
            minimum=0.0,
        ),
    )
    max_inflight_requests: int = field(
        default=100_000,
        metadata=about(
            "Requests waiting or in flight in the whole fleet, beyond which new ones are refused "
            "(HTTP 429). One user (an API key, else an address or a client) gets at most nine "
            "tenths of it, and less when others are there.",
            minimum=1,
        ),
    )
    max_inflight_bytes: int = field(
        default=8 << 30,
        metadata=about(
            "The same in bytes of prompts and parameters.",
            minimum=1,
        ),
    )
    max_frame_bytes: int = field(
        default=256 << 20,
        metadata=about(
            "Bytes of one prompt or answer on the coordinator's socket; a peer that sends more "
            "loses its connection.",
            minimum=1 << 16,
        ),
    )
    max_rank_requests: int = field(
        default=0,
        metadata=about(
            "Requests in flight on one replica beyond which the others wait in the coordinator, "
            "first come first served; 0 sets no limit and leaves the queue to the engines. A "
            "limit gives a freed place to whoever waits longest, wherever its history is, so "
            "at saturation it costs most cache hits (docs/choosing-a-policy.md).",
            minimum=0,
        ),
    )


@dataclass(frozen=True, slots=True)
class AccessSettings(Settings):
    """Who may talk to the coordinator. Immutable and picklable."""

    PREFIX: ClassVar[str] = "inference_coordinator_"

    key_file: str = field(
        default="",
        metadata=about(
            "File of the keys that the coordinator takes messages from, mode 0600: written by the "
            "job that starts the coordinator, read by jobs that join it and by trusted programs. "
            "MEGATRON_COORDINATOR_KEY_FILE names it as well. Without one, keys stay in the job.",
        ),
    )
    plain: bool = field(
        default=False,
        metadata=about(
            "Take messages from everybody who reaches the coordinator's port, unencrypted, also "
            "those that stop the fleet; released clients and engines need it.",
        ),
    )


@dataclass(frozen=True, slots=True)
class RecordSettings(Settings):
    """What the coordinator writes down for those who choose a policy. Immutable and picklable."""

    PREFIX: ClassVar[str] = "inference_coordinator_"

    record: str = field(
        default="",
        metadata=about(
            "File that gets a line of JSON for every request: when it came, the hashes of its "
            "blocks, where it went, how it ended; no prompt text, and mode 0600. It takes 16 bytes "
            "for each block of a prompt. tools/replay reads it, to compare policies (--workload "
            "decisions)."
        ),
    )
    record_max_bytes: int = field(
        default=1 << 30,
        metadata=about(
            "Bytes of that file. Before it grows larger it is renamed to FILE.1, the older FILE.1 "
            "is lost, and a new one begins; a line that no file has room for is left out.",
            minimum=1 << 20,
        ),
    )


def options() -> dict[str, Option]:
    """Every routing option by field name, in the order of `RoutingSettings`."""
    return RoutingSettings.options()


def flag(name: str) -> str:
    """The command-line flag of a routing option."""
    return RoutingSettings.flag(name)


def markdown_table() -> str:
    """The routing options as the README shows them."""
    return RoutingSettings.markdown_table()


def unused_options(settings: RoutingSettings) -> list[str]:
    """What was set and will not be read, one sentence each."""
    readers = {
        "load_beta": PrefixCachingCostPolicy.RELATIVE_LOAD_WEIGHTED,
        "routing_alpha": PrefixCachingCostPolicy.FREE_CAPACITY_WEIGHTED,
    }
    defaults = RoutingSettings()
    return [
        f"{flag(name)} is read by {flag('cost_policy')} {reader.value} alone, and "
        f"{settings.cost_policy.value} is in force"
        for name, reader in readers.items()
        if getattr(settings, name) != getattr(defaults, name) and settings.cost_policy != reader
    ]


def advice(settings: RoutingSettings) -> list[str]:
    """What somebody who chose no cost policy should know, one sentence each."""
    on_default = settings.cost_policy == PrefixCachingCostPolicy.RELATIVE_LOAD_WEIGHTED
    if not (on_default and routes_on_prefix(settings.coordinator_policy)):
        return []
    return [
        "while load is low, sessions that share a system prompt stay on one replica; "
        f"{flag('cost_policy')} {PrefixCachingCostPolicy.ADDED_DELAY.value} spreads them "
        "(docs/choosing-a-policy.md)"
    ]


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """What a coordinator is started with, beside how it routes. Immutable and picklable.

    Attributes:
        routing: How requests are routed.
        fleet: What is done when replicas are lost or busy.
        expected_ranks: Requests wait until this many ranks have registered.
        prefix_caching: Whether the engines cache prefixes at all; off means least-loaded routing.
        block_size_tokens: Tokens in one cached block, or None when there is no prefix caching.
        max_requests: Places of a stock engine, which does not tell its own.
        eviction: Eviction policy of a stock engine, which does not tell its own.
        deterministic: Break ties by load and rank number only, so that a run can be repeated.
        trace: Emit a `Trace` effect for every answered request.
        first_request_id: Number of the first request. Of a coordinator that is started again it
            must not be one that engines may still have.
    """

    routing: RoutingSettings = field(default_factory=RoutingSettings)
    fleet: FleetSettings = field(default_factory=FleetSettings)
    expected_ranks: int = 0
    prefix_caching: bool = True
    block_size_tokens: int | None = 256
    max_requests: int = 1024
    eviction: PrefixCachingEvictionPolicy = PrefixCachingEvictionPolicy.REF_ZERO
    deterministic: bool = False
    trace: bool = False
    first_request_id: int = 0

    def __post_init__(self):
        object.__setattr__(self, "eviction", PrefixCachingEvictionPolicy(self.eviction))
        if self.max_requests < 1:
            raise SettingsError(f"max_requests is {self.max_requests}; it must be 1 or more")
        if self.expected_ranks < 0:
            raise SettingsError(f"expected_ranks is {self.expected_ranks}; it must be 0 or more")
        if self.prefix_caching and not (self.block_size_tokens and self.block_size_tokens > 0):
            raise SettingsError("prefix caching needs block_size_tokens of 1 or more")

    @property
    def signal(self) -> PrefixCachingCoordinatorPolicy:
        """The signal policy in force: without prefix caching nobody has anything to match."""
        if not self.prefix_caching:
            return PrefixCachingCoordinatorPolicy.LOAD_BALANCED
        return self.routing.coordinator_policy

    @property
    def hashed(self) -> bool:
        """Whether clients should hash their prompts."""
        return routes_on_prefix(self.signal)
