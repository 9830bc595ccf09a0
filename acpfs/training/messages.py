"""Every message between members, coordinators and watchers, as a frozen record
(docs/internals/clauses/training-coordinator.md says what each is for).

`Sent` is what travels: a header, the message's kind, its fields. `decode` is total. Ranks are
integers below `world`; a shard is named by the layout (`pp0/tp1/opt2`); steps count completed
updates. What a sender may say about itself only, it says in the header. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from types import MappingProxyType
from typing import TypeAlias

from acpfs.training.records import Json, MalformedError, from_json, refuse_newer, to_json

Shard: TypeAlias = str
GASP_VERSION = 1
"""Of `gasp.json`. Its reader refuses fields that it does not know, so each new one counts."""
WIRE_VERSION = 2
"""Of the messages here, for the same reason."""
SENDER_CHARS_MAX = 40
"""Of a sender that is named before its message is understood."""
WORLD_MAX = 100_000
_NAME = re.compile(r"[^/{}]*\{step(?::0(\d{1,2})d)?\}[^/{}]*")


class Phase(Enum):
    """Where a rank is between two updates."""

    COMPUTING = "computing"
    """Forward, backward, reduction: gradients of the next update are not complete."""
    READY = "ready"
    """Gradients of update `ready` are complete here; before or in the gate."""
    UPDATING = "updating"
    """Past the gate: update `ready` is under way."""


class Gate(Enum):
    """What stands between complete gradients and the update."""

    NONE = "none"
    IMPLICIT = "implicit"
    EXPLICIT = "explicit"


class TroubleKind(Enum):
    """What a main thread met."""

    COLLECTIVE = "collective"
    """A collective or the store failed: somebody else is gone, or only the network to them.

    Not a lost rank by itself.
    """
    MEMORY = "memory"
    """Device memory is lost; `damaged` names the shards, or none: all of this rank's."""
    ERROR = "error"
    """An exception that would have ended this rank.

    It is parked as the others are, and its state is as whole as its marks say.
    """
    SAVE = "save"
    """This rank could not settle, write or publish; another may."""


class ExitStatus(IntEnum):
    """What LEAVE has members exit with; a contract for schedulers and launchers."""

    SAVED = 75
    """A gasp is published: start the job again, it goes on from there."""
    NOT_SAVED = 76
    """There was no cover, or nobody could write: start the job again from the last checkpoint."""
    TAKEN_FOR_LOST = 77
    """The others went on without this rank."""
    OTHER_SIDE = 78
    """The job was split, and the other side has the claim to save."""


@dataclass(frozen=True, slots=True)
class GateResult:
    """What an implicit gate computed for update `step`: a rank whose gate failed needs it to
    finish.
    """

    step: int
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A file below the gasp's directory."""

    path: str
    size: int
    xxh3_128: str


# -- member → coordinator


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank registers, with every coordinator.

    `holders`: for each shard that it holds, all ranks that hold it, itself included.
    """

    rank: int
    world: int
    node: str
    pid: int
    started: int
    """Field 22 of /proc/PID/stat: with it the pid cannot be somebody else's."""
    gate: Gate
    holders: Mapping[str, tuple[int, ...]]
    name: str = "step-{step}"
    """What the framework calls the checkpoint of a step: `iter_{step:07d}`."""
    begun: int = 0
    """Updates that were completed when protection began: a gasp of that step would have nothing
    new.
    """
    address: str = ""
    """Where other members reach it; empty where they need not."""
    first: bool = False
    """Where ranks are replaced: nobody was this rank before. Who was is then of another job."""

    def __post_init__(self) -> None:
        if not self.rank < self.world <= WORLD_MAX:
            raise ValueError(f"rank {self.rank} of {self.world}")
        for shard, ranks in self.holders.items():
            if (
                self.rank not in ranks
                or any(rank >= self.world for rank in ranks)
                or len(set(ranks)) != len(ranks)
            ):
                raise ValueError(f"holders of {shard} make no sense")
        checkpoint_name(self.name, 0)


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat, every `beat_s`. `clues`: number of the last collective that each group began."""

    done: int
    ready: int
    phase: Phase
    clues: Mapping[str, int] = field(default_factory=dict)
    long_operation: bool = False
    """Evaluation, a first step that compiles: the watchdog looks away."""
    parked: bool = False
    """Where ranks are replaced: outside of the loop, or before its first update; what it makes then
    needs the coordinator's store.
    """
    moved: int = 0
    """Bytes that this process has written in all; while it saves."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """The main thread met an exception."""

    kind: TroubleKind
    text: str
    damaged: tuple[Shard, ...] = ()


@dataclass(frozen=True, slots=True)
class Stopped:
    """Parked: the marks cannot move any more."""

    done: int
    ready: int
    phase: Phase
    damaged: tuple[Shard, ...] = ()
    gate: GateResult | None = None
    """The last one that this rank got."""
    published: int | None = None
    """Step of the gasp that this rank knows to be published already."""
    copies: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Step → ranks of which it has a whole copy of all that they held then."""


@dataclass(frozen=True, slots=True)
class Settled:
    """At the step of SETTLE, or not: `done` says. `digests`: shard → digest of its bytes."""

    done: int
    digests: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Saved:
    """What this saver wrote, flushed and closed; none where it only took part."""

    files: tuple[SavedFile, ...]


@dataclass(frozen=True, slots=True)
class Published:
    """The name is there, and the tracker names it."""

    path: str


@dataclass(frozen=True, slots=True)
class Stacks:
    """Python stacks of a rank that hangs, as faulthandler writes them."""

    text: str


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The rank leaves `protect` in order: its end is no fault.

    The coordinator closes the connection when it has taken this.
    """

    all_done: bool = False
    """Where ranks are replaced: it was told DONE.

    So all coordinators know, also when the one that said it has died.
    """
    why: str = ""
    """What ended its protection where its training goes on: a fault of acpfs in it."""


@dataclass(frozen=True, slots=True)
class Running:
    """Where ranks are replaced: behind the first update of this generation, or with nothing left to
    do.
    """


@dataclass(frozen=True, slots=True)
class Finished:
    """Where ranks are replaced: this one's loop has ended, and it waits for the others."""


# -- watcher or coordinator → coordinator


@dataclass(frozen=True, slots=True)
class Watch:
    """Another coordinator's process registers: it tells of its node's ranks.

    `coordinator`: its number, None for one that only watches.
    """

    node: str
    coordinator: int | None = None
    address: str = ""


@dataclass(frozen=True, slots=True)
class Exiting:
    """The kernel has begun to end this rank's process; nothing can stop that.

    `pid`: the process, since another may be the rank by now.
    """

    rank: int
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Vouching:
    """These ranks of the sender's node say nothing, and their processes work."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Exited:
    """A launcher waited for the process. `status`: as wait(2) has it.

    `updated`: it had done an update, and said so.
    """

    rank: int
    status: int
    updated: bool = False


@dataclass(frozen=True, slots=True)
class Vote:
    """A standby asks to be active in this term."""

    term: int
    candidate: int


@dataclass(frozen=True, slots=True)
class Voted:
    """The member's answer, to whoever asked."""

    term: int
    granted: bool


@dataclass(frozen=True, slots=True)
class Active:
    """The coordinator commands in this term: told when it begins, to coordinators every second, and
    to a member as answer to each BEAT.
    """

    term: int
    coordinator: int


# -- launcher → coordinator


@dataclass(frozen=True, slots=True)
class Start:
    """Coordinator to launcher: begin these ranks; the number of the first one, and what all have to
    know.
    """

    name: str
    """Of this attempt; nobody else's."""
    attempt: int
    """How often all ranks were started anew."""
    group_rank: int
    groups: int
    """Nodes of the job."""
    first_rank: int
    world: int
    master_host: str
    master_port: int
    generation: int = 0
    """Above 0: these ranks take the places of others, and the job goes on."""
    hosts: tuple[str, ...] = ()
    """Of the nodes, in their order: where launchers meet when the node is gone where they met."""


@dataclass(frozen=True, slots=True)
class Launcher:
    """A launcher registers, and says all that a coordinator needs that knows nothing yet."""

    name: str
    """Of this process; nobody else's."""
    node: str
    host: str
    """How other nodes reach it."""
    port: int
    """Free there: for the store of the ranks, if rank 0 will be there."""
    slots: int
    node_rank: int | None = None
    nodes_min: int = 1
    nodes_max: int = 1
    restarts_max: int = 0
    replaces: bool = False
    start: Start | None = None
    """What its ranks were started with, if they were."""
    replaced: int = 0
    """Replacements that it knows of."""
    ended: Mapping[int, int] = field(default_factory=dict)
    """Ranks that have ended and were not replaced: status, as wait(2) has it."""
    stopping: bool = False
    planned: bool = False


@dataclass(frozen=True, slots=True)
class Idle:
    """No rank of this node runs any more. `port`: another free one."""

    port: int


@dataclass(frozen=True, slots=True)
class Planned:
    """Somebody wants this node, or the job, to end: SIGTERM to the launcher."""


@dataclass(frozen=True, slots=True)
class Replace:
    """Coordinator to launcher: a process anew for this rank."""

    rank: int
    generation: int


@dataclass(frozen=True, slots=True)
class StopRanks:
    """Coordinator to launcher: SIGTERM to all ranks, SIGKILL to who is there when the time is
    over.
    """

    why: str


@dataclass(frozen=True, slots=True)
class Over:
    """Coordinator to launcher: the job is over; end with this status."""

    status: int
    text: str


# -- coordinator → member


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to HELLO and WATCH. `coordinators`: number → address of all that are known."""

    coordinator: int
    active: bool
    coordinators: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refused:
    """No protection: the reason is for the user. The connection ends."""

    reason: str
    is_other_job: bool = False
    """It has the same name as the rank's own, which is to be looked for elsewhere."""


@dataclass(frozen=True, slots=True)
class Protected:
    """All ranks are registered and agree on the layout: from here on a fault leaves a gasp."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Out of all collectives, into the handler. The header has the new generation."""

    lost: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Settle:
    """Be at this step. `gate`: what some rank's gate gave for it."""

    step: int
    gate: GateResult | None = None


@dataclass(frozen=True, slots=True)
class Save:
    """Write what the cover gives you. Sent to all: who is not among `savers` waits."""

    step: int
    cover: Mapping[str, int]
    """Shard → the rank that writes it."""
    savers: tuple[int, ...]
    """Ranks of the group of savers, in its order."""
    directory: str
    """Below the save directory: where to write."""
    name: str
    """What PUBLISH will rename it to."""
    lost: tuple[int, ...] = ()
    copies: Mapping[str, int] = field(default_factory=dict)
    """Shard → out of which rank's copy of that step it is written; empty: as it is now."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What `gasp.json` says."""

    job: str
    generation: int
    step: int
    lost: tuple[int, ...]
    cover: Mapping[str, int]
    files: tuple[SavedFile, ...]
    digests: Mapping[str, str]
    nodes: tuple[str, ...]
    """Nodes whose savers wrote files."""
    differing: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """Shards whose holders had different digests: rank → digest."""
    version: int = GASP_VERSION
    """Of this form; 1 is left out."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Compare the files, write `gasp.json`, rename, tracker.

    Where `name` has this gasp already, that is success.
    """

    manifest: Manifest
    directory: str
    name: str
    elsewhere: tuple[str, ...] = ()
    """Other nodes, on which a publisher of an earlier generation may have given the name to its
    gasp before it died.
    """


@dataclass(frozen=True, slots=True)
class Leave:
    """End the process with this status."""

    status: int
    text: str
    gasp: str = ""
    """Name of the published checkpoint."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Each rank has a process: make groups, take the state from whoever has it, run the loop.

    `replaced`: ranks with a new one.
    """

    replaced: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """All loops have ended: go on behind yours."""


@dataclass(frozen=True, slots=True)
class ShowStacks:
    """Answer with STACKS; the main thread may hang."""


# -- the store of a group of savers, over the link


class StoreVerb(Enum):
    """What torch asks of a store."""

    SET = "set"
    GET = "get"
    ADD = "add"
    WAIT = "wait"
    CHECK = "check"
    COMPARE_SET = "compare_set"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class StoreAsk:
    """One operation in the generation's store.

    `get` and `wait` are answered when all keys are there, or after `timeout_s` with `late`.
    """

    request: int
    verb: StoreVerb
    keys: tuple[str, ...]
    value: str = ""
    """Hexadecimal; of `add`: the decimal number, which may be negative."""
    expected: str = ""
    timeout_s: float = 300.0


@dataclass(frozen=True, slots=True)
class StoreAnswer:
    """`value`: bytes in hexadecimal, of `add` the decimal sum, of `check` and `delete` 1 or 0."""

    request: int
    value: str = ""
    late: bool = False


Ask = Callable[[StoreVerb, tuple[str, ...], str, str, float], StoreAnswer]
"""How a generation's store is asked: (verb, keys, value, expected, seconds) → answer."""


FromMember = (
    Hello
    | Beat
    | Trouble
    | Stopped
    | Settled
    | Saved
    | Published
    | Stacks
    | Goodbye
    | Voted
    | StoreAsk
    | Running
    | Finished
)
FromCoordinator = (
    Welcome
    | Refused
    | Protected
    | Stop
    | Settle
    | Save
    | Publish
    | Leave
    | Resume
    | Done
    | ShowStacks
    | Vote
    | Active
    | StoreAnswer
)
Between = Watch | Exiting | Exited | Vouching
FromLauncher = Launcher | Exited | Idle | Planned
ToLauncher = Start | Replace | StopRanks | Over
Message = FromMember | FromCoordinator | Between | Launcher | Idle | Planned | ToLauncher
KINDS: Mapping[str, type[Message]] = MappingProxyType(
    {kind.__name__.upper(): kind for kind in Message.__args__}
)


@dataclass(frozen=True, slots=True)
class Header:
    """What every message says beside its own."""

    job: str
    generation: int
    term: int
    sender: str
    """`rank 3`, `coordinator 0`, `watcher node7`."""
    version: int = WIRE_VERSION
    """Of the messages that the sender knows; the first did not say so."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A message on its way."""

    header: Header
    message: Message


def encode(sent: Sent) -> bytes:
    """JSON: the kind, the header's fields, the message's under `body`."""
    data: Json = {
        "kind": type(sent.message).__name__.upper(),
        **to_json(sent.header),
        "version": sent.header.version,
        "body": to_json(sent.message),
    }
    return json.dumps(data, separators=(",", ":")).encode("ascii")


def decode(data: bytes | bytearray | memoryview) -> Sent:
    """The other way round.

    Raises:
        NewerError: the sender's acpfs is a newer one.
        MalformedError: no JSON, an unknown kind, a field that makes no sense.
    """
    try:
        parsed = json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise MalformedError("a message that is not JSON") from error
    if not isinstance(parsed, dict):
        raise MalformedError("a message that is not an object")
    refuse_newer(
        f"what {str(parsed.get('sender'))[:SENDER_CHARS_MAX]} sends",
        parsed,
        WIRE_VERSION,
        "all ranks and launchers of a job need one acpfs",
    )
    kind = KINDS.get(str(parsed.pop("kind", None)))
    if kind is None:
        raise MalformedError("a message of no known kind")
    body = parsed.pop("body", {})
    return Sent(from_json(Header, parsed), from_json(kind, body, kind.__name__.upper()))


def checkpoint_name(pattern: str, step: int) -> str:
    """What a pattern makes of a step.

    Raises:
        ValueError: it is no pattern for one file name.
    """
    match = _NAME.fullmatch(pattern)
    if match is None or pattern.startswith(".") or "\0" in pattern:
        raise ValueError(f"{pattern!r} names no checkpoint: it needs {{step}} once, and no slash")
    digits = int(match[1] or 0)
    return re.sub(r"\{[^}]*\}", lambda _: f"{step:0{digits}d}" if digits else str(step), pattern)
