"""One dataclass per message, grouped by who receives it, and the effects of handling one.

How messages become frames, and what released megatron-core peers say instead, is the business of
`runtime/wire.py` and `runtime/codec.py`.

Messages are values: nobody changes one. They are not frozen nevertheless, since a frozen dataclass
of five fields takes 0.74 us to make, one that is not 0.16 us, and a request takes about ten.
"""

from collections.abc import Buffer, Mapping
from dataclasses import dataclass, field
from enum import Flag, IntEnum, StrEnum, auto
from typing import Any, Protocol

from megatron.core.inference.coordinator.lifecycle import FleetState, Signal


class Body(Buffer, Protocol):
    """What is passed on and not looked into: bytes, or the frame that it arrived in.

    Who does look into one makes bytes of it first.
    """

    def __len__(self) -> int:
        """How many bytes it holds."""
        ...


class Header(IntEnum):
    """First item of every message's metadata, besides the control signals of `lifecycle.Signal`.

    22 to 26 and 81 are taken by newer megatron-core; what the released peers do not know starts
    at 30.
    """

    CONNECT = 0
    CONNECT_ACK = 1
    SUBMIT_REQUEST = 20
    ENGINE_REPLY = 21
    REGISTER = 30
    REGISTER_ACK = 31
    KV_EVENTS = 32
    REQUEST_ERROR = 33
    PING = 34
    PONG = 35
    REGISTER_AGAIN = 36
    RESYNC = 37
    DRAIN = 38
    DRAIN_ACK = 39
    SERVING = 50
    DISCONNECT = 60
    SHUTDOWN = 61


class ErrorCode(StrEnum):
    """Why a request got no answer; travels in REQUEST_ERROR."""

    NO_REPLICA = "no_replica"
    REPLICA_LOST = "replica_lost"
    NOT_CONNECTED = "not_connected"
    REGISTRATION_REFUSED = "registration_refused"
    OVERLOADED = "overloaded"
    FORBIDDEN = "forbidden"
    FLEET_PAUSED = "fleet_paused"


class Right(Flag):
    """What a peer may do; the coordinator's runtime knows it from the peer's key."""

    ENGINE = auto()
    SUBMIT = auto()
    CONTROL = auto()
    ALL = ENGINE | SUBMIT | CONTROL


# --- to the coordinator ------------------------------------------------------------------------


@dataclass(slots=True)
class Connect:
    """A client introduces itself.

    Attributes:
        version: Its protocol version; None for a released client, which has none.
        text_prompts: It has no tokenizer: prompts may be text, and replies must hold text.
    """

    version: int | None
    text_prompts: bool = True


@dataclass(slots=True)
class SubmitRequest:
    """A client asks for a completion.

    Attributes:
        client_request_id: The client's own name for it, given back with the answer.
        prompt_tokens: Length of the prompt; -1 when the client does not know it.
        sampling: Packed sampling parameters.
        prompt: Packed prompt: text or token ids.
        hashes: Packed block hashes; None means not hashed, empty means no full block.
        owner: Whom the client asks for, e.g. the holder of an API key; empty: for itself.
    """

    client_request_id: Any
    prompt_tokens: int
    sampling: Body
    prompt: Body
    hashes: bytes | None = None
    owner: str = ""

    @property
    def size(self) -> int:
        """Bytes of its bodies."""
        return len(self.sampling) + len(self.prompt) + len(self.hashes or b"")


@dataclass(slots=True)
class Control:
    """A control signal: from a client to the coordinator, or from it to an engine."""

    signal: Signal
    args: tuple[Any, ...] = ()


@dataclass(slots=True)
class Shutdown:
    """A client ends the coordinator; the engines are not told."""


@dataclass(slots=True)
class Register:
    """A replica offers itself.

    Attributes:
        version: Its protocol version; None for a released engine, whose other fields are unknown.
        replica: Id of the job it belongs to.
        dp_rank: Its data-parallel rank in that job.
        weight_epoch: Epoch of the weights it holds.
        max_requests: Requests it can run at once.
        block_size: Tokens in one of its cache blocks; 0 when it caches no prefixes.
        total_blocks: Blocks in its cache.
        eviction: Its eviction policy, `lru` or `ref_zero`.
        generation: What it was acknowledged as before, by whatever coordinator; 0 for never.
        requests: Ids of the requests that it has still, or has answered lately.
        state: Name of the `FleetState` that it was last told, where it has been acknowledged.
    """

    version: int | None
    replica: str = ""
    dp_rank: int = 0
    weight_epoch: int = 0
    max_requests: int = 0
    block_size: int = 0
    total_blocks: int = 0
    eviction: str = ""
    generation: int = 0
    requests: list[int] = field(default_factory=list)
    state: str = ""


@dataclass(slots=True)
class Answer:
    """One finished request.

    Attributes:
        request_id: The coordinator's number for it.
        status: Name of the engine's final status, e.g. COMPLETED or FAILED.
        cached_tokens: Prompt tokens whose prefill was skipped; -1 when the engine does not tell.
        weight_epoch: Epoch it was computed under; -1 when the engine does not tell.
        body: The packed reply.
        event_number: How many cache events the engine had when it scheduled the request; -1 when
            it does not tell.
    """

    request_id: int
    status: str
    cached_tokens: int
    weight_epoch: int
    body: Body
    event_number: int = -1


@dataclass(slots=True)
class EngineReply:
    """An engine's finished requests of one step."""

    answers: tuple[Answer, ...]


@dataclass(slots=True)
class KvEvents:
    """What an engine stored, removed and cleared since its last batch (`kv_events.py`).

    Attributes:
        weight_epoch: Epoch of the blocks.
        first: Number of the first event.
        count: How many events there are.
        events: The packed events.
    """

    weight_epoch: int
    first: int
    count: int
    events: bytes


@dataclass(slots=True)
class Pong:
    """An engine's answer to Ping."""

    number: int


@dataclass(slots=True)
class Drain:
    """An engine wants to leave: it is to get no more requests, and answers those it has."""


@dataclass(slots=True)
class Disconnect:
    """An engine or a client takes its leave."""


@dataclass(slots=True)
class Malformed:
    """What a peer sent is no message of this protocol.

    Attributes:
        reason: What is wrong with it.
    """

    reason: str


@dataclass(slots=True)
class PeerLost:
    """The runtime found that nothing can be sent to this peer any more.

    Attributes:
        undelivered: Ids of the requests that could not be handed to it.
    """

    undelivered: tuple[int, ...] = ()


@dataclass(slots=True)
class Tick:
    """Time passed: the runtime says so about once a second, from no peer.

    Attributes:
        stood_still: Seconds that the runtime itself could not run, since the tick before.
    """

    stood_still: float = 0.0


@dataclass(slots=True)
class Sweep:
    """The runtime has nothing else to do: a piece of what was forgotten can be swept out."""


# --- to a client -------------------------------------------------------------------------------


@dataclass(slots=True)
class ConnectAck:
    """The client is known from here on.

    Attributes:
        version: The coordinator's protocol version.
        signal: The signal policy in force, which tells whether to hash.
        block_size: Tokens in a block; 0 when nothing is cached.
        weight_epoch: The present weight epoch.
    """

    version: int
    signal: str
    block_size: int
    weight_epoch: int


@dataclass(slots=True)
class Serving:
    """Whether requests sent now would be served; a client that is told nothing takes it that so.

    Attributes:
        serving: A replica is there, and it runs or somebody is there to let it run again.
        reason: Why not, as what "the coordinator" does; empty: it has no replica.
    """

    serving: bool
    reason: str = ""


@dataclass(slots=True)
class Reply:
    """A client's answer."""

    client_request_id: Any
    body: Body


@dataclass(slots=True)
class RequestError:
    """A client's request that got no answer, or a CONNECT or REGISTER that was refused.

    Attributes:
        client_request_id: The client's own name for it; None where there was no request.
        code: An `ErrorCode`.
        text: Whose fault it is, and what to do.
    """

    client_request_id: Any
    code: str
    text: str


# --- to an engine ------------------------------------------------------------------------------


@dataclass(slots=True)
class EngineRequest:
    """A request handed to an engine; its id is unique per attempt."""

    request_id: int
    weight_epoch: int
    sampling: Body
    prompt: Body


@dataclass(slots=True)
class RegisterAck:
    """The replica is part of the fleet.

    Attributes:
        rank: Its number in the coordinator.
        generation: How often this rank has registered.
        weight_epoch: The epoch in force.
        state: What the fleet is at present.
        kept: Of the requests that it has, those that nobody else was given.
    """

    rank: int
    generation: int
    weight_epoch: int
    state: FleetState
    kept: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Ping:
    """Asks an engine whether it is there; sending it also finds broken connections."""

    number: int


@dataclass(slots=True)
class Resync:
    """Asks an engine for its whole table of blocks, as events that begin with a clear."""


@dataclass(slots=True)
class DrainAck:
    """No request follows this to an engine that asked to be drained."""


@dataclass(slots=True)
class RegisterAgain:
    """Tells an engine that it is not, or no longer, part of the fleet."""


# --- in and out --------------------------------------------------------------------------------

ToCoordinator = (
    Connect
    | SubmitRequest
    | Control
    | Shutdown
    | Register
    | EngineReply
    | KvEvents
    | Pong
    | Drain
    | Disconnect
    | Malformed
    | PeerLost
    | Tick
    | Sweep
)
FromCoordinator = (
    ConnectAck
    | Serving
    | Reply
    | RequestError
    | EngineRequest
    | Control
    | RegisterAck
    | Ping
    | Resync
    | RegisterAgain
    | DrainAck
)


@dataclass(slots=True)
class Incoming:
    """A message and the identity of the peer that sent it (empty for `Tick` and `Sweep`).

    Attributes:
        peer: The identity.
        message: The message.
        rights: What the peer may do.
    """

    peer: bytes
    message: ToCoordinator
    rights: Right = Right.ALL


@dataclass(slots=True)
class Send:
    """Effect: send a message to a peer."""

    peer: bytes
    message: FromCoordinator


@dataclass(slots=True)
class Log:
    """Effect: say something. `event` is constant; what varies is in `fields`.

    Attributes:
        event: Constant name.
        fields: What varies.
        warning: Whether it deserves attention.
        peer: Who could cause any number of these; the runtime says each event once per peer.
    """

    event: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    warning: bool = False
    peer: bytes | None = None


class Outcome(StrEnum):
    """How a request ended."""

    ANSWERED = "answered"
    FAILED = "failed"  # the engine could not take it: too long, for example
    REPLICA_LOST = "replica_lost"
    NO_REPLICA = "no_replica"
    FLEET_PAUSED = "fleet_paused"  # and nobody was left to end that, or to wait for an answer


@dataclass(slots=True)
class Trace:
    """Effect: one request is over, for those who study decisions (`CoordinatorSettings.trace`).

    Attributes:
        outcome: How it ended; of those that were not answered only the first fields are known.
        request_id: The coordinator's number for its last try.
        client: Identity of who asked; None once it was gone.
        came: When it came, seconds of the coordinator's clock.
        prompt_tokens: Length of its prompt, -1 if unknown.
        hashes: Its packed block hashes; None where it was not hashed, or nobody reads them.
        rank: The rank that had it; None where none did.
        predicted_tokens: Prefill that the engine was expected to skip, tokens.
        cached_tokens: What it did skip; -1 where it does not tell.
        in_window: See `accuracy.Accuracy`.
        reply: Its packed answer, if it has one.
    """

    outcome: Outcome
    request_id: int
    client: bytes | None
    came: float
    prompt_tokens: int
    hashes: bytes | None
    rank: int | None
    predicted_tokens: int = 0
    cached_tokens: int = -1
    in_window: bool = False
    reply: Body | None = None


@dataclass(slots=True)
class Stop:
    """Effect: end the coordinator."""


Effect = Send | Log | Trace | Stop
