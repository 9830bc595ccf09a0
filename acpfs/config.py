"""Settings: one validated schema, one place for defaults, units in the names.

Precedence: command line, then TOML file, then the defaults here. Keys in the file are the field
names; the command line's options are the same names with dashes and without unit suffix. An unknown
key or a nonsense value is a `ConfigError` that names it.
"""

import math
import os
import re
import sys
import types
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from attrs import NOTHING, Attribute, asdict, define, fields_dict, setters
from attrs.converters import optional, pipe, to_bool
from attrs.validators import and_, ge, gt, in_, le, matches_re
from attrs.validators import optional as maybe

from acpfs.checkpoints import DEFAULT_PATTERNS, Checkpoints
from acpfs.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*([kmgtp]?)(?:i?b)?$", re.IGNORECASE)
_NUMA = r"(default|local|interleave|(interleave|bind):\d+(-\d+)?(,\d+(-\d+)?)*|prefer:\d+)"
RAM_BYTES_MIN = 1 << 20
RESERVE_PERCENT_MAX = 75
"""Of the budget: with more kept for urgent files, little would be left for all others."""
AUTO = "auto"
OFF = "off"
LOOPBACK = "127.0.0.1"
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


def parse_size(value: object) -> int:
    """Bytes from `64G`, `512MiB`, `1.5t` or a number; factors of 1024, as mount options have them.

    Raises:
        ValueError: not a size.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.match(str(value).strip())
    if match is None:
        raise ValueError(f"{value!r} is not a size such as 64G or 512M")
    return int(float(match[1]) * 1024 ** _POWER[match[2].lower()])


def _parse_ram(value: object) -> int | str:
    text = str(value).strip()
    if text.endswith("%"):
        percent = float(text[:-1])
        if not 0 < percent <= 90:
            raise ValueError("a share of memory must lie between 0% and 90%")
        return text
    size = parse_size(value)
    if size < RAM_BYTES_MIN:
        raise ValueError(f"the RAM tier needs at least {RAM_BYTES_MIN >> 20} MiB")
    return size


def share_of(wanted: int | str, whole: int) -> int:
    """Bytes of a setting that is a number of bytes or a share such as `50%`; never more than the
    whole.
    """
    return min(
        whole, int(whole * float(wanted.rstrip("%")) / 100) if isinstance(wanted, str) else wanted
    )


def _parse_prefault(value: object) -> int | str:
    text = str(value).strip()
    return AUTO if text == AUTO else _parse_share(text)


def _parse_share(value: object) -> int | str:
    text = str(value).strip()
    if not text.endswith("%"):
        return parse_size(value)
    if not 0 <= float(text[:-1]) <= 100:
        raise ValueError("a share of the budget must lie between 0% and 100%")
    return text


def _parse_reserve(value: object) -> int | str:
    share = _parse_share(value)
    if isinstance(share, str) and float(share[:-1]) > RESERVE_PERCENT_MAX:
        raise ValueError(
            f"at most {RESERVE_PERCENT_MAX}% of the budget can be kept for urgent files"
        )
    return share


def _parse_patterns(value: object) -> tuple[str, ...]:
    parts = [part for part in value.split(":") if part] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        raise ValueError("must be a list of patterns")
    return tuple(parts)


def _known_shapes(value: tuple[str, ...]) -> tuple[str, ...]:
    try:
        Checkpoints(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return value


def _whole(value: object) -> int:
    if (
        isinstance(value, bool)
        or (isinstance(value, float) and not value.is_integer())
        or not isinstance(value, int | float | str)
    ):
        raise ValueError("must be a whole number")
    try:
        return int(value)
    except (ValueError, OverflowError):
        raise ValueError("must be a whole number") from None


def _number(value: object) -> float:
    try:
        number = (
            math.nan
            if isinstance(value, bool) or not isinstance(value, int | float | str)
            else float(value)
        )
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError("must be a number")
    return number


def _text(value: object) -> str:
    if not isinstance(value, str):
        # a wrong type is a wrong value, in a file that people write
        raise ValueError("must be text")  # noqa: TRY004
    return value


def _address(value: object) -> str:
    text = _text(value)
    if text == LOOPBACK:
        return text
    import ipaddress  # most mounts have no need of it

    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise ValueError("must be an address of IPv4 or IPv6, not a name") from None


def _path(value: object) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise ValueError("must be a path")  # noqa: TRY004 - the same
    return Path(value)


def _one_of(kind: type[Enum]) -> Callable[[object], Enum]:
    def choose(value: object) -> Enum:
        try:
            return kind(value)
        except ValueError:
            raise ValueError(
                f"must be one of {', '.join(str(member.value) for member in kind)}"
            ) from None

    return choose


def _listens(value: object) -> str:
    text = _text(value).strip()
    if re.fullmatch(r"[A-Za-z0-9_.:-]{1,64}", text) is None:
        raise ValueError("must be off, auto, an address or the name of a network interface")
    return text


class Check(NamedTuple):
    """How a setting's value is made of what was given, and what must be so then; beside its type,
    where the type does not say it.
    """

    parse: Callable[[Any], Any]
    must: Any = None
    """A validator of attrs."""


Size = Annotated[int, Check(parse_size)]
RamSize = Annotated[int | str, Check(_parse_ram)]
PrefaultSize = Annotated[int | str, Check(_parse_prefault)]
Reserve = Annotated[int | str, Check(_parse_reserve)]
Share = Annotated[int | str, Check(_parse_share)]
Patterns = Annotated[tuple[str, ...], Check(_parse_patterns)]
CheckpointPatterns = Annotated[tuple[str, ...], Check(pipe(_parse_patterns, _known_shapes))]
Seconds = Annotated[float, Check(_number, ge(0))]


class Transport(str, Enum):
    """How the kernel is spoken to."""

    AUTO = "auto"
    NATIVE = "native"
    LIBFUSE = "libfuse"


class LockMode(str, Enum):
    """What flock and fcntl locks keep out; docs/SEMANTICS.md."""

    LOCAL = "local"
    """Programs of this machine: they are the kernel's own."""
    REFUSE = "refuse"
    """Nobody, and no lock is granted: ENOLCK."""


class FsyncMode(str, Enum):
    """What fsync means; docs/SEMANTICS.md."""

    ORDERED = "ordered"
    COPIED = "copied"
    """Another member has it, too (`copies`), or it is persisted."""
    DURABLE = "durable"


class WhenFull(str, Enum):
    """What a writer meets when the RAM tier is full of dirty bytes."""

    WAIT = "wait"
    NATIVE = "native"
    ERROR = "error"


class WhenKilled(str, Enum):
    """What becomes of a file whose writer is killed before it has closed it."""

    KEEP = "keep"
    """It is `interrupted`: in the mount as far as it was written, and not published.

    A log is published.
    """
    PUBLISH = "publish"
    """It is published as far as it was written."""


class Adopt(str, Enum):
    """When this mount drains what it holds of a node that is lost."""

    AUTO = "auto"
    ASKED = "asked"


class SpillMode(str, Enum):
    """What goes to the spill directory."""

    MOVE = "move"
    """Complete files that wait for the drain, when RAM is short."""
    MIRROR = "mirror"
    """Each complete file as soon as it can be, as a copy, with a journal: what is there survives a
    reboot of the node.
    """


class WarmReads(str, Enum):
    """Whether cold files that are read come to RAM."""

    ON = "on"
    OFF = "off"
    AUTO = "auto"


class ClusterOrder(str, Enum):
    """What waits for other nodes before it is committed."""

    POINTERS = "pointers"
    ALL = "all"
    OFF = "off"


class OnFailure(str, Enum):
    """What applications meet when acpfs cannot go on."""

    NATIVE = "native"
    STOP = "stop"


DEFAULT_POINTER_PATTERNS = (
    "latest",
    "latest_*",
    "*tracker*",
    "latest_checkpointed_iteration.txt",
    ".metadata",
    "commit_success.txt",
    "*.index.json",
    "trainer_state.json",
)


REMEMBERED_VOLUME = "remembered"
ANY_VOLUME = "any"


_BY_TYPE: dict[Any, Callable[[Any], Any]] = {str: _text, bool: to_bool, Path: _path}


def _check_of(kind: Any) -> Check:
    """What belongs to a type."""
    if get_origin(kind) is Annotated:
        found: Check = get_args(kind)[1]
        return found
    if isinstance(kind, types.UnionType):
        return Check(optional(_BY_TYPE[get_args(kind)[0]]))
    return Check(_one_of(kind) if issubclass(kind, Enum) else _BY_TYPE[kind])


def _with_checks(_settings: type, found: list["Attribute[Any]"]) -> list["Attribute[Any]"]:
    """For attrs: each field with what belongs to its type."""
    checks = [_check_of(attribute.type) for attribute in found]
    return [
        attribute.evolve(
            converter=check.parse,
            validator=check.must,
            on_setattr=setters.pipe(setters.convert, setters.validate, _given),
        )
        for attribute, check in zip(found, checks, strict=True)
    ]


def _given(settings: "Settings", attribute: "Attribute[Any]", value: Any) -> Any:
    settings.given |= {attribute.name}
    return value


@define(init=False, kw_only=True, slots=False, eq=False, repr=False, field_transformer=_with_checks)
class Settings:
    """Everything that a mount can be told.

    Whatever sets a value checks it: the constructor, and an assignment.

    Fields and their types say what is right; the text below each is its description
    (`descriptions`).
    """

    def __init__(self, **given: Any) -> None:
        """Values by name, as people write them.

        Raises:
            ValueError: a value makes no sense.
            TypeError: a name is unknown or missing.
        """
        self.given = frozenset(given)
        """Names of those that are not just left at their defaults."""
        self.__attrs_init__(**given)

    backing: Path
    """The backing directory."""
    mountpoint: Path
    """Where applications see the file system."""
    ram: RamSize = "25%"
    """Budget of the RAM tier: bytes, or percent of what the machine or cgroup has."""
    numa: Annotated[str, Check(_text, matches_re(_NUMA))] = "default"
    """NUMA nodes of the RAM tier: default, local, interleave, interleave:NODES, bind:NODES or
    prefer:NODE; NODES as 0-3 or 0,2 (in mount options, where commas divide, only 0-3).

    Another policy holds for files written from then on.
    """
    spill: Path | None = None
    """A directory on a local disk for complete files that wait for the drain and have no room in
    RAM, or are to survive a reboot.

    Must exist, apart from backing directory and mount point; acpfs makes `acpfs-<volume>-<node id>`
    (0700) in it.
    """
    spill_budget: Share = "80%"
    """Most bytes that acpfs takes there: bytes, or percent of what is free there at the mount (or
    when it is `set`), and what acpfs has there.
    """
    spill_mode: SpillMode = SpillMode.MOVE
    """move: files go there when RAM is short; mirror: each is copied there at once, and survives a
    reboot of the machine.
    """
    prefault: PrefaultSize = AUTO
    """Memory to get ready before a save needs it, while nobody writes: bytes, or percent of the
    budget; 0: none; `auto`: a quarter of the budget, or what the largest save that is known needs,
    up to half, on a virtual machine where the daemon's control group has no limit; none elsewhere.
    """
    reserve: Reserve = 0
    """The last part of the budget, only for files below paths that were declared urgent: bytes, or
    percent of the budget, three quarters of it at most; 0: none.

    All other files have only the rest of the budget.
    """
    ram_per_user: Share = 0
    """Most bytes of RAM that the files of one owner may take before the storage has them: bytes, or
    percent of the budget; 0: no limit. Who has more waits as where RAM is full; others do not.
    """
    transport: Transport = Transport.AUTO
    """How the kernel is spoken to: native (its own session on /dev/fuse), libfuse, or auto: the
    fastest that works here.
    """
    fsync: FsyncMode = FsyncMode.ORDERED
    """What fsync means: ordered (safe in RAM, place in the order fixed), copied (another member has
    it, too, S589: needs `copies`, else it is durable) or durable (persisted).
    """
    locks: LockMode = LockMode.LOCAL
    """flock and fcntl locks: local (they keep out programs of this mount only, and other nodes
    grant them at the same time, S456) or refuse (ENOLCK to all, S460; native transport only).
    """
    idmap: bool = False
    """Let idmapped mounts be made of this one (S538), as pods with `hostUsers: false` have them;
    native transport, Linux 6.12.
    """
    node_id: Annotated[
        str | None, Check(optional(_text), maybe(matches_re(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")))
    ] = None
    """This mount's identity among all that share the backing directory; default: made up at the
    first mount on a mount point.
    """
    expect_volume: Annotated[
        str, Check(_text, matches_re(rf"({REMEMBERED_VOLUME}|{ANY_VOLUME}|[0-9a-f]{{32}})"))
    ] = REMEMBERED_VOLUME
    """The volume that must lie at the backing directory: remembered (that of the last mount), its
    id (in .acpfs/volume), or any.
    """
    new_volume: bool = False
    """Take what lies there now for the volume from now on: another one, an empty directory, or
    another file system.

    For one mount: left in a configuration file it takes anything, always.
    """
    nested: bool = False
    """Mount also where a directory above is the backing directory of other mounts: there is no
    order between the two (S457).
    """
    streams: Annotated[int, Check(_whole, and_(ge(1), le(256)))] = 8
    """Files copied to the backing directory at the same time."""
    bandwidth: Size = 0
    """Most bytes per second that streams may write together; 0: no limit."""
    stagger_s: Seconds = 0.0
    """Members begin to drain a save one after the other, the last one at most so much later; 0: all
    at once.

    For storage that is slower with many clients at a time.
    """
    when_full: WhenFull = WhenFull.WAIT
    """What a writer meets when the RAM tier is full of dirty bytes: `wait` for its turn, `native`
    (this file goes straight to its staging file on the backing directory, at its speed), or `error`
    (ENOSPC; the half that a writer leaves keeps its room in RAM until it is removed, or `retry` or
    `discard` decides).

    Clean files leave first, whatever it is. A change holds also for those who wait.
    """
    when_killed: WhenKilled = WhenKilled.KEEP
    """What becomes of a file whose writer is killed in the middle (S181): keep (not published
    before someone decides; its bytes stay in RAM), or publish (as it is).
    """
    warm_reads: WarmReads = WarmReads.AUTO
    """Whether a file that is read from the backing directory comes to RAM: auto (where RAM is
    free), on (clean files that no checkpoint and no pin keeps make room), off.
    """
    verify_reads: bool = False
    """Also large files are compared with their checksum before an open for reading returns."""
    preload: str | None = None
    """Brought to RAM behind the mount: latest (the newest checkpoint that is there), or paths below
    the mount point, a:b:c.
    """
    on_failure: OnFailure = OnFailure.NATIVE
    """What applications meet when acpfs cannot go on: native (the backing directory itself, at the
    same path) or stop (errors).
    """
    keeper_wait_s: Seconds = 300.0
    """How long a keeper holds the mount for the next daemon when all its processes were killed;
    then `on_failure` holds. 0: for ever.
    """
    max_dirty_age_s: Seconds = 30.0
    """A log that stays open (a file that only grows, S12) is committed as of now this often; 0:
    never.
    """
    verify_after_write: bool = False
    """Read every stream back and compare checksums before it counts as done."""
    scrub_ram_s: Seconds = 43200.0
    """What RAM has of files is compared with their checksums about once in so long, in the
    background (S235), at 256 MiB/s at most; 0: never.
    """
    attr_timeout_s: Seconds = 1.0
    """How old knowledge about the backing directory may be."""
    patience_s: Seconds = 1.0
    """How long a request waits for the backing directory when there is older knowledge to go on
    with.
    """
    backing_timeout_s: Annotated[float, Check(_number, gt(0))] = 120.0
    """How long a request waits for the backing directory when there is not; then EIO.

    Of a file that is read whole (to be changed, or compared): so long without one more byte.
    """
    drain_timeout_s: Seconds = 600.0
    """How long SIGTERM and a umount(8) drain before they give up and keep the rest."""
    retry_delay_min_s: Annotated[float, Check(_number, gt(0))] = 0.2
    """First delay before a failed operation is tried again; it doubles from try to try."""
    retry_delay_max_s: Annotated[float, Check(_number, gt(0))] = 60.0
    """Longest such delay."""
    pointer_patterns: Patterns = DEFAULT_POINTER_PATTERNS
    """Names of files that point at other files; committed only when all that precedes them is
    flushed. In options: a:b:c.
    """
    cluster_order: ClusterOrder = ClusterOrder.POINTERS
    """What waits until all other members have persisted what they had closed before: `pointers`
    (files and renamed directories), `all` or `off`.
    """
    heartbeat_s: Annotated[float, Check(_number, and_(ge(0.1), le(60)))] = 2.0
    """How often this member tells the others how far it is; a pointer waits for one heartbeat and
    the clock bound at most, beyond what other members need to drain.

    Longer by itself with more than 1,024 members.
    """
    clock_bound_s: Seconds = 0.5
    """The most that clocks of two machines differ by; it is checked, and where more was measured,
    that counts.
    """
    node_timeout_s: Annotated[float, Check(_number, ge(1))] = 30.0
    """A member that was not heard for so long is missing: pointers that wait for it are withheld.
    """
    node_forget_after_s: Seconds = 0.0
    """A missing member is forgotten after so long; 0: only an operator forgets."""
    wait_for_peers_s: Annotated[float, Check(_number, and_(ge(0), le(3600)))] = 0.0
    """How long an open waits for a file that is not there yet, but that another member has closed
    and is draining; 0: ENOENT at once.
    """
    exchange: Annotated[str, Check(_listens)] = OFF
    """Read what is cold from members that have it, before the storage is asked, and give others
    what is here (S539): off, auto (the addresses of the host name), an address, or a network
    interface.

    Needs the program `openssl`, and a network between the members (see OPERATIONS).
    """
    exchange_patience_s: Annotated[float, Check(_number, gt(0))] = 0.3
    """How long a member may say nothing when its bytes are asked for; then another one is asked, or
    the storage (S542).
    """
    copies: Annotated[int, Check(_whole, and_(ge(0), le(1)))] = 0
    """Other members that keep a copy of what is closed here, in their RAM, until it is persisted
    (S580): 0 or 1.

    The copy is made in the background. Needs `exchange`, which is `auto` then, and no `spill`.
    """
    copies_ram: Share = "25%"
    """Most of the RAM tier's budget that this mount gives to copies of others (S583): bytes, or
    percent of the budget; 0: it holds nothing. Counts where `exchange` is on.
    """
    failure_domain: str | None = None
    """What fails together with this mount, as a rack's name (S581): copies are held by members with
    another one; default: the host.
    """
    adopt: Adopt = Adopt.ASKED
    """When this mount drains what it holds of a node that is lost (S613): auto, by itself where
    `acpfs doctor BACKING --second DIR` has seen that the storage refuses late calls, or asked, only
    when `acpfs-ctl adopt` says that the node is off.
    """
    adopts: Annotated[
        str | None, Check(optional(_text), maybe(matches_re(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")))
    ] = None
    """Drain the log of another node, which is `node_id`, as the node of this name, which holds its
    copy (S587): what `acpfs-ctl adopt` mounts with, and nobody else.
    """
    adopts_alone: bool = False
    """As `adopts`, where nobody has said that the node is off: refused where it may have begun what
    no fence stops. The mount itself sets it, and nobody else.
    """
    peer_encryption: bool = True
    """Encrypt what members send each other; without, on a network that is the job's own, they still
    show their keys first (S546).
    """
    keep_checkpoints: Annotated[int, Check(_whole, ge(0))] = 2
    """Newest checkpoints of each save_dir that stay in RAM as long as there is room without
    them.
    """
    checkpoint_patterns: CheckpointPatterns = DEFAULT_PATTERNS
    """Shapes of checkpoints, as globs with {step}, {epoch}, {part}, {suffix}, {a|b}; see below.

    In options: a:b:c.
    """
    keep_last_persisted: bool = True
    """Leave a deleted checkpoint on the backing directory while no newer one of its save_dir is
    persisted; see SEMANTICS.md.

    `--no-keep-last-persisted` switches it off.
    """
    guard_time_s: Seconds = 1800.0
    """… but at most for so long after its deletion."""
    allow_other: bool = True
    """Let other users use the mount (the kernel checks permissions)."""
    control_group: str | None = None
    """Group that may use the control socket besides its owner."""
    runtime_dir: Path | None = None
    """Where sockets and RAM tiers live; default /run/acpfs for root, else
    $XDG_RUNTIME_DIR/acpfs.
    """
    log_level: Annotated[str, Check(_text, in_(("debug", "info", "warning", "error")))] = "info"
    """debug, info, warning or error."""
    log_file: Path | None = None
    """Rotating log file (10 MB × 5); default: stderr in the foreground (for the journal), else a
    file named after the mount point.
    """
    metrics_port: Annotated[int, Check(_whole, and_(ge(0), le(65535)))] = 0
    """Serve Prometheus metrics over HTTP on this port; 0: only through `acpfs-ctl metrics`."""
    metrics_address: Annotated[str, Check(_address)] = LOOPBACK
    """The address of this machine at which it does (S303): 127.0.0.1, a pod's own, or 0.0.0.0 or ::
    for all.

    There is no password: whoever reaches it may read the numbers.
    """
    metrics_file: Path | None = None
    """Write Prometheus metrics into this file every 15 s, for a node exporter's textfile
    collector.
    """

    def __attrs_post_init__(self) -> None:
        if self.retry_delay_min_s > self.retry_delay_max_s:
            raise ValueError("retry_delay_min_s is larger than retry_delay_max_s")
        if self.spill_mode is SpillMode.MIRROR and self.spill is None:
            raise ValueError("spill_mode = mirror needs a directory: spill")
        if self.copies and self.spill is not None:
            raise ValueError("copies = 1 and a spill directory: only one of the two")
        if self.copies and self.exchange == OFF and "exchange" in self.given:
            raise ValueError("copies = 1 needs exchange")
        if self.adopts is not None and (self.spill is None or self.node_id is None):
            raise ValueError("adopts goes with node_id and a spill directory: see acpfs-ctl adopt")
        if self.needs_native and self.transport is Transport.LIBFUSE:
            raise ValueError(f"{self.needs_native} needs the native transport")

    @property
    def listens(self) -> str:
        """Where it is reached by others: `exchange`, or `auto` where copies need one."""
        return AUTO if self.copies and self.exchange == OFF else self.exchange

    @property
    def needs_native(self) -> str:
        """The setting that libfuse cannot keep; "" for none."""
        # pyfuse3 offers no lock operations, so the kernel grants locks without asking, and no way
        # to take FUSE_ALLOW_IDMAP
        if self.locks is LockMode.REFUSE:
            return "locks = refuse"
        return "idmap = true" if self.idmap else ""

    def changed(self, **values: Any) -> "Settings":
        """A copy with other values."""
        return Settings(**{**{name: getattr(self, name) for name in self.given}, **values})

    def as_json(self, *, given_only: bool = False) -> dict[str, Any]:
        """As JSON and TOML have it."""
        found = asdict(self, value_serializer=lambda _settings, _attribute, value: _plain(value))
        return (
            {name: value for name, value in found.items() if name in self.given}
            if given_only
            else found
        )


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return list(value)
    return os.fspath(value) if isinstance(value, Path) else value


FIELDS: dict[str, "Attribute[Any]"] = fields_dict(Settings)
"""All settings by name."""


def descriptions() -> dict[str, str]:
    """What each setting is, for people: the text below it in this file.

    Read when somebody asks, which a mount does not.
    """
    import ast
    import inspect

    lines = ast.parse(inspect.getsource(Settings)).body[0]
    assert isinstance(lines, ast.ClassDef)
    found = {}
    for line, below in zip(lines.body, lines.body[1:], strict=False):
        if (
            isinstance(line, ast.AnnAssign)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            found[ast.unparse(line.target)] = str(below.value.value)
    return found


CHANGEABLE = (
    "bandwidth",
    "streams",
    "log_level",
    "ram",
    "when_full",
    "keep_checkpoints",
    "spill_budget",
    "wait_for_peers_s",
    "reserve",
    "ram_per_user",
)
"""What `acpfs-ctl set` may change while the mount is in use."""


def option_name(field: str) -> str:
    """`max_dirty_age_s` → `max-dirty-age`: a setting's name on the command line and in mount
    options.
    """
    return field.removesuffix("_s").replace("_", "-")


def field_named(option: str) -> str | None:
    """Inverse of `option_name`, tolerant of underscores and of the unit suffix; None for an unknown
    name.
    """
    wanted = option_name(option.replace("-", "_"))
    return next((field for field in FIELDS if option_name(field) == wanted), None)


def load_settings(overrides: Mapping[str, Any], file: Path | None = None) -> Settings:
    """Settings from a TOML file (if any) and from the command line, which wins.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, or a value makes no sense; the
            message names it.
    """
    values = {} if file is None else _read_toml(file)
    return validated({**values, **overrides}, "" if file is None else f" (command line and {file})")


def validated(values: Mapping[str, Any], source: str = "") -> Settings:
    """Settings from plain values.

    Raises:
        ConfigError: naming each key with what is wrong with it.
    """
    complaints = [
        f"{name} is missing"
        for name, known in FIELDS.items()
        if known.default is NOTHING and name not in values
    ]
    complaints += [
        complaint for name, value in values.items() if (complaint := _complaint(name, value))
    ]
    try:
        if not complaints:
            return Settings(**values)
    except ValueError as error:  # one that two settings make together
        complaints = [str(error)]
    raise ConfigError("; ".join(complaints) + source)


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            return tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error


def _complaint(name: str, value: object) -> str:
    """What is wrong with one value; empty: nothing."""
    field = FIELDS.get(name)
    if field is None:
        return f"unknown key {name!r}"
    try:
        check = _check_of(field.type)
        parsed = check.parse(value)
        if check.must is not None:
            check.must(None, field, parsed)
    except ValueError as error:
        text = str(error.args[0]).removeprefix(f"{name!r} ").removesuffix(f": {value}")
        return f"{name}: {text}" if text.startswith(repr(value)) else f"{name} = {value!r}: {text}"
    return ""
