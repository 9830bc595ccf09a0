"""What the operation log is made of: operations, versions, metadata.

Plain records; no behaviour beyond (de)serialisation. The file system makes them, the engine carries
them out.
"""

from __future__ import annotations

import enum
import errno
import json
import stat
from dataclasses import dataclass, field

from acpfs.types import NO_INO, NO_TIER, Ino, Seq, TierId, VersionId
from acpfs.writeback.log.stages import TABLE, WAYS, Aside, IllegalStepError, Stage, Step
from acpfs.writeback.log.verdicts import Why

WITHHELD = errno.EHOSTDOWN
"""Error of a pointer that is set aside because another member is missing; no file system refuses an
operation with it.
"""

OLD_CONTENT = -1000
"""See `Op.old_content`."""


class OpKind(enum.Enum):
    """Kinds of logged operations. All are idempotent when carried out on the backing directory."""

    STORE = "store"
    """Make `version` the content of node `ino`: at `parent`/`name` when the node has no place yet,
    else at all its places.
    """
    MKDIR = "mkdir"
    RMDIR = "rmdir"
    UNLINK = "unlink"
    RENAME = "rename"
    """Move `ino` from `parent`/`name` to `new_parent`/`new_name`, replacing `victim` if that is not
    0.
    """
    EXCHANGE = "exchange"
    """Swap `ino` at `parent`/`name` and `victim` at `new_parent`/`new_name`."""
    LINK = "link"
    """Give node `ino` the additional name `parent`/`name`."""
    SYMLINK = "symlink"
    """Symlink with target `payload`."""
    MKNOD = "mknod"
    """fifo, socket or device (regular files are STOREd)."""
    SETATTR = "setattr"
    """Set the fields of `meta` that are not None."""
    SETXATTR = "setxattr"
    """Set and remove `meta.xattrs` (value None: remove)."""


ATTRIBUTES = frozenset({OpKind.SETATTR, OpKind.SETXATTR})
"""Change no name."""


@dataclass(slots=True)
class Metadata:
    """Attributes to give a node on the backing directory; None means "leave as it is".

    Times are nanoseconds since the epoch.
    """

    permissions: int | None = None
    """The permission bits of a mode, and nothing else."""
    uid: int | None = None
    gid: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None
    rdev: int = 0
    xattrs: dict[bytes, bytes | None] = field(default_factory=dict)
    file_type: int = 0
    """The other bits of a mode: what MKNOD makes, which no later change of attributes changes; 0
    elsewhere.
    """

    @property
    def mode(self) -> int | None:
        """As mknod(2) takes it, and as a row of the state has it."""
        return None if self.permissions is None else self.file_type | self.permissions

    def merge(self, later: Metadata) -> None:
        """Fold a later change into this one."""
        for name in ("permissions", "uid", "gid", "atime_ns", "mtime_ns"):
            value = getattr(later, name)
            if value is not None:
                setattr(self, name, value)
        self.xattrs.update(later.xattrs)

    def gives_rights(self, earlier: Metadata) -> bool:
        """Whether somebody may do something else with the node after it than after `earlier`."""
        for name in ("permissions", "uid", "gid"):
            value = getattr(self, name)
            if value is not None and value != getattr(earlier, name):
                return True
        return any(
            not name.startswith(b"user.")
            and (name not in earlier.xattrs or earlier.xattrs[name] != value)
            for name, value in self.xattrs.items()
        )

    def narrowed_from(self, earlier: Metadata) -> Metadata:
        """Owner, group and permissions with which nobody may do more than after `earlier`, nor than
        after this change of it; None as in `earlier` where that leaves them as they are.

        A close of an older acpfs may not say what permissions the file had. Then its owner alone is
        left what this change gives, for he could give it to himself; a new one, nothing.
        """
        uid = earlier.uid if self.uid is None else self.uid
        gid = earlier.gid if self.gid is None else self.gid
        has_others = (uid, gid) != (earlier.uid, earlier.gid)
        left = earlier.permissions
        if left is None:
            if self.permissions is None and not has_others:
                return Metadata(uid=uid, gid=gid)
            left = 0 if has_others else stat.S_IRWXU
        if has_others:
            # whoever was its owner, of its group, or another may be any of these by now
            left = (left >> 6 & left >> 3 & left & 0o7) * 0o111
        if self.permissions is not None:
            left &= self.permissions
        return Metadata(permissions=left, uid=uid, gid=gid)

    def to_json(self) -> str:
        """Compact form for the state database.

        Most have no xattrs, and need no encoder (5 us, several times per small file).
        """
        if not self.xattrs:
            numbers = [self.mode, self.uid, self.gid, self.atime_ns, self.mtime_ns, self.rdev]
            return f"{str(numbers).replace('None', 'null')[:-1]}, {{}}]"
        xattrs = {k.hex(): None if v is None else v.hex() for k, v in self.xattrs.items()}
        return json.dumps(
            [self.mode, self.uid, self.gid, self.atime_ns, self.mtime_ns, self.rdev, xattrs]
        )

    @classmethod
    def from_json(cls, text: str) -> Metadata:
        mode, uid, gid, atime_ns, mtime_ns, rdev, xattrs = json.loads(text)
        decoded = {
            bytes.fromhex(k): None if v is None else bytes.fromhex(v) for k, v in xattrs.items()
        }
        permissions = None if mode is None else stat.S_IMODE(mode)
        file_type = 0 if mode is None else stat.S_IFMT(mode)
        return cls(permissions, uid, gid, atime_ns, mtime_ns, rdev, decoded, file_type)


class VersionState(enum.Enum):
    """Where a version's bytes are; see docs/internals/versions-and-streams.md, "States"."""

    COMPLETE = "complete"
    """Frozen in the RAM tier, nothing on the backing directory yet."""
    STREAMING = "streaming"
    """Being copied into its staging file. After a restart this is COMPLETE again."""
    STAGED = "staged"
    """All bytes are in the staging file and flushed; the RAM tier's copy is no longer needed to
    commit.
    """
    COMMITTED = "committed"
    """Renamed into place."""


@dataclass(slots=True)
class Version:
    """A frozen content of node `ino`: the first `size` bytes of tier file `tier_id`.

    `tier_id` is 0 when the version's bytes are elsewhere: in its copy (`spilled`), or in its
    staging file only. It is changed by the file system, under its lock, also when it copies the
    bytes aside; a stream that reads notices and reads the chunk again from there.
    """

    vid: VersionId
    ino: Ino
    tier_id: TierId
    size: int
    state: VersionState = VersionState.COMPLETE
    staging_name: str = ""
    staging_ino: int = 0
    spilled: bool = False
    """They are in the copy that the spill directory has of it, and not in RAM."""
    digest: str = ""
    """xxh3-128 of the content, 32 lower-case hex digits (canonical form, as `xxh128sum` prints it);
    "" until it is known.
    """
    streamed_bytes: int = 0
    renewals: int = 0
    """How often its bytes (and `size`) had to become newer ones; a stream that began before starts
    again. Not persisted.
    """
    changed: int = 0
    """See `Op.changed`."""

    @property
    def is_local(self) -> bool:
        """Whether RAM or the spill directory has its bytes."""
        return self.tier_id != NO_TIER or self.spilled

    @property
    def is_staged(self) -> bool:
        """Whether the backing directory has all bytes."""
        return self.state in (VersionState.STAGED, VersionState.COMMITTED)


WITH_CONTENT = b"with its content"
"""Payload of a rename, see `Op.is_with_content`; no other operation's can be that, but a link's."""


@dataclass(slots=True)
class Op:
    """One change that the backing directory has not seen yet."""

    seq: Seq
    kind: OpKind
    ino: Ino
    parent: Ino = NO_INO
    name: bytes = b""
    new_parent: Ino = NO_INO
    new_name: bytes = b""
    victim: Ino = NO_INO
    meta: Metadata = field(default_factory=Metadata)
    payload: bytes = b""
    """Of a symlink its target, of what attributes a directory is given `former_permissions`; see
    `moved_for`, `is_with_content`, `Committer`.
    """
    version: Version | None = None
    logged_at: float = 0.0
    """Wall clock, seconds: when the application's call was made."""
    tries: int = 0
    last_error: int | None = None
    """errno of the last failure."""
    next_attempt_at: float = 0.0
    """Wall clock, seconds; 0 when no retry is scheduled."""
    stage: Stage = Stage.LOGGED
    """Only `take` changes it."""
    aside: Aside = Aside.NONE
    """Only `put` changes it."""
    held_for: Why = Why.READY
    """While it is held: as the order last saw it. Not persisted."""
    # What follows is no state: each says what has happened to the operation, whatever stage it is
    # in and wherever it stands, and stays. `let_go` is set once, and outlives GUARDED: the guard
    # would hold the deletion again. `delayed` outlives PUT_OFF in the same way.
    let_go: bool = False
    """A deletion that the guard has nothing against, or not any more."""
    delayed: bool = False
    """A removal that waits, or waited, for other members, which may write under its name meanwhile.

    Persisted: whom it waited for may be forgotten when the next worker begins.
    """
    awaits_members: bool = False
    """Other members were asked, and have not all persisted what has to come first: until then the
    order ends here. Not persisted.
    """
    is_pointer: bool | None = None
    """Whether it makes a file visible that points at others; None: not asked yet (see `Order`).

    Not persisted.
    """
    takes_pointer: bool | None = None
    """Whether it removes or replaces such a file; None: not asked yet. Not persisted."""
    last_detail: str = ""
    """What `last_error` is in words, as the log has it. Not persisted."""
    changed: int = 0
    """Which change of the state was the last one of its row, but for `stage`. Not persisted."""

    def take(self, step: Step) -> None:
        """Go on.

        Raises:
            IllegalStepError: that does not lead anywhere from here.
        """
        stage = TABLE.get((self.stage, step))
        if stage is None:
            raise IllegalStepError(
                f"operation {self.seq}, {self.kind.value}, {self.stage.name}: {step.value}"
            )
        self.stage = stage

    @property
    def tentative(self) -> bool:
        """Whether its close may not have been the last."""
        return self.stage <= Stage.TENTATIVE

    @property
    def unsealed(self) -> bool:
        """Whether bytes of it are in RAM that its staging file does not have."""
        return self.stage in (Stage.TENTATIVE_UNSEALED, Stage.UNSEALED)

    @property
    def begun(self) -> bool:
        """Whether the backing directory may have carried it out."""
        return self.stage >= Stage.IN_DOUBT

    @property
    def started(self) -> bool:
        """Whether it may be on its way there right now, or is there."""
        return self.stage >= Stage.UNDER_WAY

    @property
    def committed(self) -> bool:
        """Whether it is there."""
        return self.stage is Stage.COMMITTED

    @property
    def is_flush_failed(self) -> bool:
        """Whether it was carried out, and a flush of it may have failed since: what there is of it
        is not known.
        """
        return self.committed and self.last_error is not None

    def put(self, aside: Aside) -> None:
        """Out of the order, or back.

        Raises:
            IllegalStepError: not from where it is.
        """
        if aside not in WAYS[self.aside]:
            raise IllegalStepError(
                f"operation {self.seq}, {self.kind.value}: from {self.aside.value} to {aside.value}"
            )
        self.aside = aside

    @property
    def withheld(self) -> bool:
        """Whether it is parked because another member is missing, and not because the backing
        directory refused it.
        """
        return self.aside is Aside.WITHHELD

    @property
    def parked(self) -> bool:
        """Whether it is, for either reason."""
        return self.aside in (Aside.PARKED, Aside.WITHHELD)

    @property
    def is_stuck(self) -> bool:
        """Whether it waits for one that is parked, or put off, or is parked itself."""
        return self.aside in (Aside.PARKED, Aside.WITHHELD, Aside.HELD)

    @property
    def moved_for(self) -> Ino:
        """Of a directory that is moved aside: the one that is to take its place; 0: of all else."""
        return Ino(int(self.payload.partition(b" ")[2] or 0)) if self.new_parent < 0 else NO_INO

    @property
    def is_with_content(self) -> bool:
        """Of a rename: whether it was begun together with the content before it, in one call."""
        return self.kind is OpKind.RENAME and self.payload == WITH_CONTENT

    @property
    def old_content(self) -> Ino:
        """Of a removal that is held back: the number of what it removes, once its file has other
        content under its other names.

        Nobody's node: nodes have positive numbers, directories of `.acpfs` small negative ones.
        """
        return Ino(OLD_CONTENT - self.seq)

    @property
    def sets_rights(self) -> bool:
        """Whether it gives a node other permission bits."""
        return self.kind in ATTRIBUTES and self.meta.permissions is not None

    @property
    def former_permissions(self) -> int | None:
        """Of a change of a directory's attributes: the permission bits before it; None: not
        known.
        """
        return int(self.payload, 8) if self.payload else None

    def concerns(self, directory: Ino) -> bool:
        """Whether it changes a name in a directory, or the directory itself."""
        return self.ino == directory or any(parent == directory for parent, _name in self.touches())

    def touches(self) -> tuple[tuple[Ino, bytes], ...]:
        """The names (directory, name) that this operation mentions and therefore pins."""
        if self.kind in ATTRIBUTES:
            return ()
        if self.new_parent:
            return ((self.parent, self.name), (self.new_parent, self.new_name))
        return ((self.parent, self.name),) if self.parent else ()
