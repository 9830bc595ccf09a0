"""One storage in memory: what it shows, what a loss of power would leave, and where calls on it
begin and end.

It is as deep as `Lower`, and outlives the lives that use it. Each call tells `Storage.caller` when
it begins and when it ends: there the others have their turns, and there faults come from. Knows
neither lives nor programs. One thread at a time (`scheduler`), so it has no lock.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import random
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from acpfs.backing import posix_acl
from acpfs.backing.leftovers import MIRRORS
from acpfs.backing.lower import (
    OVERFLOW_PREFIX,
    LowerEntry,
    LowerPath,
    LowerStat,
    NewAttributes,
    Note,
    SpaceInfo,
    lstat_each,
)
from acpfs.backing.quirks import Features
from tests.sim.shown import LINKS, MODE, MTIME, OWNER, Shown, attribute
from tests.sim.virtual import FIRST_FD

P = ParamSpec("P")
T = TypeVar("T")
OWN = b".acpfs"
NODE = "node"
BLOCK_BYTES = 4096
BLOCKS = 1 << 20
START_NS = 10**18
ONLY_COPIES = (OVERFLOW_PREFIX.encode(),)
DEPTH_MAX = 30
"""Of what a loss of power leaves: names lost one by one can leave a directory below itself."""


class Caller(Protocol):
    """Who makes calls: one life, or nobody in particular."""

    def begins(self, label: str, arguments: Sequence[object], *, changes: bool) -> bool:
        """Before it has any effect; raises where the storage fails so.

        Whether its answer will be lost.
        """
        ...

    def ends(
        self, label: str, arguments: Sequence[object], error: OSError | None, *, is_lost: bool
    ) -> None:
        """After it had its effect, or failed; raises where the answer is lost."""
        ...


class Nobody:
    """Calls of the simulation itself."""

    def begins(self, label: str, arguments: Sequence[object], *, changes: bool) -> bool:
        return False

    def ends(
        self, label: str, arguments: Sequence[object], error: OSError | None, *, is_lost: bool
    ) -> None: ...


@dataclass(eq=False)
class Inode:
    """A file, directory or symlink."""

    ino: int
    mode: int
    content: bytearray = field(default_factory=bytearray)
    children: dict[bytes, Inode] = field(default_factory=dict)
    target: bytes = b""
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    uid: int = 0
    gid: int = 0
    rdev: int = 0
    atime_ns: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    nlink: int = 1
    safe: bytes | None = None
    """The content as it was when it was last flushed."""
    is_only_copy: bool = False
    """It was made for bytes that RAM has no room for."""
    _as_bytes: bytes | None = b""

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    def written(self) -> None:
        self._as_bytes = None

    def as_bytes(self) -> bytes:
        """The same object as long as nothing was written, so that comparing states is cheap."""
        if self._as_bytes is None:
            self._as_bytes = bytes(self.content)
        return self._as_bytes


@dataclass
class NameChange:
    """Names that change together, and the directories of which no flush has come since."""

    names: list[tuple[Inode, bytes, Inode | None]]
    former: list[tuple[Inode, bytes, Inode | None]]
    unflushed: set[Inode]

    def take_back(self) -> None:
        """It never was."""
        for directory, name, inode in self.former:
            if inode is None:
                directory.children.pop(name, None)
            else:
                directory.children[name] = inode


def error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def call(
    label: str, *, changes: bool = False
) -> Callable[[Callable[Concatenate[Storage, P], T]], Callable[Concatenate[Storage, P], T]]:
    """A call on the storage; `changes`: what is stored."""

    def wrap(
        method: Callable[Concatenate[Storage, P], T],
    ) -> Callable[Concatenate[Storage, P], T]:
        @functools.wraps(method)
        def made(storage: Storage, /, *arguments: P.args, **named: P.kwargs) -> T:
            caller = storage.caller
            is_lost = caller.begins(label, arguments, changes=changes)
            try:
                result = method(storage, *arguments, **named)
            except OSError as failure:
                caller.ends(label, arguments, failure, is_lost=is_lost)
                raise
            caller.ends(label, arguments, None, is_lost=is_lost)
            return result

        return made

    return wrap


class Storage:
    """A backing directory."""

    def __init__(self) -> None:
        self.node = NODE
        """Whose staging files are made."""
        self.caller: Caller = Nobody()
        self.features = Features()
        self.counts_subdirectories = True
        """A directory has 2 links and one more for each directory in it (ext4); else 1 (btrfs)."""
        self.reuses_numbers = False
        """A new inode gets the number of one that is gone, as on ext4."""
        self.capacity_bytes: int | None = None
        self.shown: list[Shown] = []
        """Each state that others could see, in order; whoever judges them takes them away."""
        self.notes_attributes = False
        self.shown_attributes: list[Shown] = []
        """Of each of these states, where somebody judges them."""
        self.descriptors: dict[int, Inode] = {}
        self._handed: dict[int, Inode] = {}
        """Of deleted files that are open: the supervisor has a descriptor of each (`Nameless`)."""
        self._fds = itertools.count(FIRST_FD)
        self._inos = itertools.count(100)
        self._gone: list[int] = []
        self._granularity_ns = 1
        self._ticks = itertools.count(1)
        self._changes: list[NameChange] = []
        self.losses = 0
        """How often names were lost with the server."""
        self.root = Inode(1, stat.S_IFDIR | 0o755)
        self._make_own((OWN, b"nodes"), (OWN, b"manifest"))
        self._flushed_tree = self._copy_of_tree()

    def _make_own(self, *paths: LowerPath) -> None:
        """What acpfs makes as it mounts: these, and areas of the node."""
        for path in (self._staging, self._kept, *paths):
            for depth in range(1, len(path) + 1):
                if not self._is_there(path[:depth]):
                    self._place(path[:depth], self._inode(stat.S_IFDIR | 0o700))

    @property
    def _staging(self) -> LowerPath:
        return (OWN, b"staging", self.node.encode())

    @property
    def _kept(self) -> LowerPath:
        return (OWN, b"kept", self.node.encode())

    # -- for the simulation

    def put(self, path: bytes, content: bytes) -> None:
        """Was there before anybody mounted it; a path that ends with a slash is a directory."""
        names = tuple(path.rstrip(b"/").split(b"/"))
        is_directory = path.endswith(b"/")
        inode = self._inode(stat.S_IFDIR | 0o755 if is_directory else stat.S_IFREG | 0o644)
        inode.content[:] = content
        inode.written()
        inode.safe = inode.as_bytes()
        self._place(names, inode)
        self._changes.clear()
        self._flushed_tree = self._copy_of_tree()

    def visible(self) -> Shown:
        """What others see."""
        found: Shown = {}
        self._collect(self.root, b"", found)
        return found

    def attributes(self) -> Shown:
        """What others see beside contents."""
        found: Shown = {}
        self._collect_attributes(self.root, b"", found)
        return found

    def _collect_attributes(self, inode: Inode, path: bytes, found: Shown) -> None:
        for name, child in inode.children.items():
            if inode is self.root and name == OWN:
                continue
            place = path + name + b"/" * child.is_directory
            found[attribute(place, MODE)] = b"%o" % stat.S_IMODE(child.mode)
            found[attribute(place, OWNER)] = b"%d:%d" % (child.uid, child.gid)
            found[attribute(place, MTIME)] = b"%d" % child.mtime_ns
            if child.is_directory:
                self._collect_attributes(child, place, found)
            else:
                found[attribute(place, LINKS)] = b"%d" % child.nlink
            for xattr, value in child.xattrs.items():
                if not xattr.startswith(b"user.acpfs."):
                    found[attribute(place, xattr)] = value

    def tidy(self, chance: random.Random, *, all_of_them: bool = False) -> list[bytes]:
        """Somebody removes a staging file that is not the only copy of anything, or all of them;
        their names.
        """
        area = self._find(self._staging)
        names = sorted(name for name in area.children if not name.startswith(ONLY_COPIES))
        if names and not all_of_them:
            names = [chance.choice(names)]
        for name in names:
            self._remove((*self._staging, name))
        return names

    def give_mode(self, path: bytes, old: int, new: int) -> bool:
        """Somebody gives a directory another mode, where it has that one, and nobody gave it an
        ACL.
        """
        names = tuple(path.rstrip(b"/").split(b"/"))
        if not self._is_there(names):
            return False
        inode = self._find(names)
        if stat.S_IMODE(inode.mode) != old or posix_acl.ACCESS in inode.xattrs:
            return False
        inode.mode = stat.S_IFDIR | new
        return True

    def remove_directory(self, path: bytes) -> None:
        """Somebody does, without a daemon."""
        self._remove(tuple(path.rstrip(b"/").split(b"/")))
        self._changed()

    def after_power_loss(self, chance: random.Random, *, any_order: bool) -> Shown:
        """What a loss of power could leave now.

        Contents that were not flushed are torn. Of names a journal loses the latest changes; with
        `any_order` any that were not flushed are lost.
        """
        tree = {one: dict(children) for one, children in self._flushed_tree.items()}
        least = self._flushed_changes()
        until = len(self._changes) if any_order else chance.randint(least, len(self._changes))
        for change in self._changes[:until]:
            if any_order and change.unflushed and chance.random() < 0.5:
                continue
            for directory, name, inode in change.names:
                children = tree.setdefault(directory, {})
                if inode is None:
                    children.pop(name, None)
                else:
                    children[name] = inode
        found: Shown = {}
        self._left(tree, self.root, b"", found, chance)
        return found

    def _flushed_changes(self) -> int:
        """A flush of one change is one of all before it."""
        flushed = [at for at, change in enumerate(self._changes) if not change.unflushed]
        return flushed[-1] + 1 if flushed else 0

    def _lasting_changes(self) -> int:
        staging = self._find(self._staging)
        removed = [
            at
            for at, change in enumerate(self._changes, 1)
            if all(now is None and place is not staging for place, _name, now in change.names)
        ]
        return max([self._flushed_changes(), *removed])

    def lose(self, chance: random.Random) -> int:
        """A server ends, and with it the latest changes of names that were not flushed; how many.

        Contents stay, as acpfs has flushed those before they get a name; so do attributes. So does
        what was removed, or replaced by what was moved away since: where that is there again, acpfs
        leaves it (`Recheck`).
        """
        first = chance.randint(self._lasting_changes(), len(self._changes))
        while self._brings_back(first):
            first += 1
        lost = self._changes[first:]
        del self._changes[first:]
        for change in reversed(lost):
            change.take_back()
        if lost:
            self.losses += 1
            self._count_links()
            self._changed()
        return len(lost)

    def _brings_back(self, first: int) -> bool:
        """Whether a name that leads nowhere would lead to what was replaced under it, without the
        changes from the `first` on.
        """
        former: dict[tuple[int, bytes], Inode | None] = {}
        moved: dict[tuple[int, bytes], Inode | None] = {}
        for change in self._changes[first:]:
            for directory, name, inode in change.former:
                former.setdefault((id(directory), name), inode)
                moved[id(directory), name] = inode
        now = {
            (id(directory), name): directory.children.get(name)
            for change in self._changes[first:]
            for directory, name, _inode in change.former
        }
        return any(
            now[place] is None and before is not None and before is not moved[place]
            for place, before in former.items()
        )

    def _count_links(self) -> None:
        links = Counter[Inode]()
        todo = [self.root]
        while todo:
            children = todo.pop().children.values()
            links.update(child for child in children if not child.is_directory)
            todo += [child for child in children if child.is_directory]
        for inode, count in links.items():
            inode.nlink = count

    def fill(self, free_bytes: int | None) -> None:
        """Leave so much room; None: as much as anybody wants."""
        self.capacity_bytes = None if free_bytes is None else self._used_bytes() + free_bytes

    def settle(self) -> None:
        """All that is there is on its disk by now."""
        todo = [self.root]
        while todo:
            inode = todo.pop()
            inode.safe = inode.as_bytes()
            todo += inode.children.values()
        self._changes.clear()
        self._flushed_tree = self._copy_of_tree()

    def forget_descriptors(self) -> None:
        """The process that had them is gone."""
        self.descriptors.clear()

    def keep(self, number: int, fds: list[int]) -> None:
        """A supervisor has these for the next worker of its session; none: it forgets them."""
        self._handed.pop(number, None)
        for fd in fds:
            self._handed[number] = self._open(fd)

    def handed_on(self) -> dict[int, int]:
        """What it hands to the next worker, which has descriptors of its own."""
        return {number: self._descriptor(inode) for number, inode in self._handed.items()}

    def _left(
        self,
        tree: dict[Inode, dict[bytes, Inode]],
        directory: Inode,
        prefix: bytes,
        found: Shown,
        chance: random.Random,
    ) -> None:
        for name, inode in tree.get(directory, {}).items():
            if (directory is self.root and name == OWN) or prefix.count(b"/") > DEPTH_MAX:
                continue
            if inode.is_directory:
                found[prefix + name + b"/"] = b""
                self._left(tree, inode, prefix + name + b"/", found, chance)
            elif stat.S_ISREG(inode.mode):
                found[prefix + name] = _torn(inode, chance)
            else:
                found[prefix + name] = inode.target

    def _copy_of_tree(self) -> dict[Inode, dict[bytes, Inode]]:
        found: dict[Inode, dict[bytes, Inode]] = {}
        todo = [self.root]
        while todo:
            directory = todo.pop()
            found[directory] = dict(directory.children)
            todo += [child for child in directory.children.values() if child.is_directory]
        return found

    def _collect(self, inode: Inode, path: bytes, found: Shown) -> None:
        for name, child in inode.children.items():
            if inode is self.root and name == OWN:
                continue
            if child.is_directory:
                found[path + name + b"/"] = b""
                self._collect(child, path + name + b"/", found)
            else:
                found[path + name] = child.as_bytes() if stat.S_ISREG(child.mode) else child.target

    # -- the tree

    def keep_times_to(self, granularity_ns: int) -> None:
        """Times are no finer than that."""
        self._granularity_ns = granularity_ns
        self.features = replace(self.features, time_granularity_ns=granularity_ns)

    def _now_ns(self) -> int:
        return self._coarse(START_NS + next(self._ticks))

    def _coarse(self, time_ns: int) -> int:
        return time_ns - time_ns % self._granularity_ns

    def _lost_a_name(self, inode: Inode) -> None:
        inode.nlink -= 1
        is_gone = inode.nlink == 0 and inode not in self._opened()
        if self.reuses_numbers and (is_gone or inode.is_directory):
            self._gone.append(inode.ino)

    def _inode(self, mode: int) -> Inode:
        now = self._now_ns()
        number = self._gone.pop() if self._gone else next(self._inos)
        return Inode(number, mode, atime_ns=now, mtime_ns=now, ctime_ns=now)

    def _is_there(self, path: LowerPath) -> bool:
        try:
            self._find(path)
        except OSError:
            return False
        return True

    def _find(self, path: LowerPath) -> Inode:
        inode = self.root
        for name in path:
            if not inode.is_directory:
                raise error(errno.ENOTDIR)
            try:
                inode = inode.children[name]
            except KeyError:
                raise error(errno.ENOENT) from None
        return inode

    def _directory(self, path: LowerPath) -> Inode:
        inode = self._find(path)
        if not inode.is_directory:
            raise error(errno.ENOTDIR)
        return inode

    def _place(self, path: LowerPath, inode: Inode) -> None:
        parent = self._directory(path[:-1])
        if path[-1] in parent.children:
            raise error(errno.EEXIST)
        self._names((parent, path[-1], inode))

    def _remove(self, path: LowerPath) -> None:
        parent = self._directory(path[:-1])
        self._lost_a_name(parent.children[path[-1]])
        self._names((parent, path[-1], None))

    def _names(self, *names: tuple[Inode, bytes, Inode | None]) -> None:
        """These change together."""
        now = self._now_ns()
        former = [(one, name, one.children.get(name)) for one, name, _inode in names]
        for directory, name, inode in names:
            if inode is None:
                del directory.children[name]
            else:
                directory.children[name] = inode
                inode.ctime_ns = now
            directory.mtime_ns = now
            directory.ctime_ns = now
        self._changes.append(NameChange(list(names), former, {one for one, _name, _inode in names}))

    def _changed(self) -> None:
        self.shown.append(self.visible())
        if self.notes_attributes:
            self.shown_attributes.append(self.attributes())

    def _is_visible(self, inode: Inode, below: Inode | None = None) -> bool:
        return any(
            child is inode or self._is_visible(inode, child)
            for name, child in (below or self.root).children.items()
            if below or name != OWN
        )

    def _stat(self, inode: Inode) -> LowerStat:
        links = inode.nlink if self.features.link_counts else 1
        if inode.is_directory:
            subdirectories = sum(child.is_directory for child in inode.children.values())
            links = 2 + subdirectories if self.counts_subdirectories else 1
        return LowerStat(
            inode.ino,
            inode.mode,
            links,
            inode.uid,
            inode.gid,
            inode.rdev,
            len(inode.content),
            -(-len(inode.content) // 512),
            inode.atime_ns,
            inode.mtime_ns,
            inode.ctime_ns,
            1,
        )

    def _used_bytes(self) -> int:
        inodes = {id(inode): inode for inode in self._opened()}
        todo = [self.root]
        while todo:
            for child in todo.pop().children.values():
                inodes[id(child)] = child
                if child.is_directory:
                    todo.append(child)
        return sum(len(inode.content) for inode in inodes.values())

    def _need(self, count: int) -> None:
        if (
            self.capacity_bytes is not None
            and count > 0
            and self._used_bytes() + count > self.capacity_bytes
        ):
            raise error(errno.ENOSPC)

    # -- looking

    @call("lstat")
    def lstat(self, path: LowerPath) -> LowerStat:
        return self._stat(self._find(path))

    def lstat_many(self, directory: LowerPath, names: Sequence[bytes]) -> list[LowerStat | None]:
        return lstat_each(self.lstat, directory, names)

    @call("listdir")
    def listdir(self, path: LowerPath) -> list[LowerEntry]:
        children = self._directory(path).children.items()
        return [LowerEntry(n, c.ino, stat.S_IFMT(c.mode)) for n, c in children if path or n != OWN]

    @call("open")
    def open_read(self, path: LowerPath) -> int:
        return self._descriptor(self._find(path))

    def open_uncached(self, path: LowerPath) -> int:
        return self.open_read(path)

    def _opened(self) -> list[Inode]:
        return [*self.descriptors.values(), *self._handed.values()]

    def _descriptor(self, inode: Inode) -> int:
        fd = next(self._fds)
        self.descriptors[fd] = inode
        return fd

    @call("readlink")
    def readlink(self, path: LowerPath) -> bytes:
        return self._find(path).target

    @call("xattrs")
    def xattrs(self, path: LowerPath) -> dict[bytes, bytes]:
        xattrs = self._find(path).xattrs.items()
        return {name: value for name, value in xattrs if not name.startswith(b"user.acpfs.")}

    def digest(self, path: LowerPath) -> str:
        note = self.note(path)
        return "" if note is None else note.digest

    @call("note")
    def note(self, path: LowerPath) -> Note | None:
        return _note(self._find(path))

    def space(self) -> SpaceInfo:
        total = BLOCKS if self.capacity_bytes is None else self.capacity_bytes // BLOCK_BYTES
        used = 0 if self.capacity_bytes is None else -(-self._used_bytes() // BLOCK_BYTES)
        free = max(0, total - used)
        return SpaceInfo(BLOCK_BYTES, total, free, free, BLOCKS, BLOCKS, 255)

    # -- names

    @call("mkdir", changes=True)
    def mkdir(self, path: LowerPath) -> None:
        self._need(BLOCK_BYTES)
        self._place(path, self._handed_on(path, self._inode(stat.S_IFDIR | 0o700)))
        self._changed()

    def keeping_directories(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def _handed_on(self, path: LowerPath, inode: Inode) -> Inode:
        """With what its directory's ACL gives to what is made there."""
        default = self._directory(path[:-1]).xattrs.get(posix_acl.DEFAULT)
        if default is not None:
            inode.mode, access = posix_acl.inherited(default, inode.mode)
            if access is not None:
                inode.xattrs[posix_acl.ACCESS] = access
            if inode.is_directory:
                inode.xattrs[posix_acl.DEFAULT] = default
        return inode

    @call("rmdir", changes=True)
    def rmdir(self, path: LowerPath) -> None:
        if self._directory(path).children:
            raise error(errno.ENOTEMPTY)
        self._remove(path)
        self._changed()

    @call("unlink", changes=True)
    def unlink(self, path: LowerPath) -> None:
        if self._find(path).is_directory:
            raise error(errno.EISDIR)
        self._remove(path)
        self._changed()

    @call("rename", changes=True)
    def rename(self, source: LowerPath, target: LowerPath) -> None:
        inode = self._find(source)
        parent = self._directory(target[:-1])
        old = parent.children.get(target[-1])
        if old is inode:
            return
        if old is not None:
            if old.is_directory != inode.is_directory:
                raise error(errno.EISDIR if old.is_directory else errno.ENOTDIR)
            if old.children:
                raise error(errno.ENOTEMPTY)
            self._lost_a_name(old)
        if inode.is_directory and target[: len(source)] == source:
            raise error(errno.EINVAL)
        came_from = self._directory(source[:-1])
        self._names((came_from, source[-1], None), (parent, target[-1], inode))
        self._changed()

    @call("exchange", changes=True)
    def exchange(self, a: LowerPath, b: LowerPath) -> None:
        inode_a = self._find(a)
        inode_b = self._find(b)
        parent_a = self._directory(a[:-1])
        parent_b = self._directory(b[:-1])
        self._names((parent_a, a[-1], inode_b), (parent_b, b[-1], inode_a))
        self._changed()

    def exchange_aside(self, a: LowerPath, b: LowerPath) -> LowerPath:
        return self.staging_path("exchange")

    @call("link", changes=True)
    def link(self, source: LowerPath, target: LowerPath) -> None:
        inode = self._find(source)
        self._place(target, inode)
        inode.nlink += 1
        self._changed()

    @call("symlink", changes=True)
    def symlink(self, target: bytes, path: LowerPath) -> None:
        inode = self._inode(stat.S_IFLNK | 0o777)
        inode.target = target
        self._place(path, inode)
        self._changed()

    @call("mknod", changes=True)
    def mknod(self, path: LowerPath, mode: int, rdev: int) -> None:
        inode = self._handed_on(path, self._inode(mode))
        inode.rdev = rdev
        self._place(path, inode)
        self._changed()

    # -- attributes

    @call("set times", changes=True)
    def set_times(self, path: LowerPath, atime_ns: int, mtime_ns: int) -> None:
        inode = self._find(path)
        inode.atime_ns = self._coarse(atime_ns)
        inode.mtime_ns = self._coarse(mtime_ns)

    @call("apply", changes=True)
    def apply(self, path: LowerPath, attributes: NewAttributes) -> None:
        self._apply(self._find(path), attributes)

    @call("apply", changes=True)
    def apply_fd(self, fd: int, attributes: NewAttributes) -> None:
        self._apply(self._open(fd), attributes)

    def _apply(self, inode: Inode, attributes: NewAttributes) -> None:
        inode.ctime_ns = self._now_ns()
        for name in ("uid", "gid", "atime_ns", "mtime_ns"):
            value = getattr(attributes, name)
            if value is not None:
                setattr(inode, name, self._coarse(value) if name.endswith("_ns") else value)
        for xattr, content in attributes.xattrs.items():
            if content is None:
                inode.xattrs.pop(xattr, None)
            elif xattr == posix_acl.ACCESS:
                _give_acl(inode, content)
            else:
                inode.xattrs[xattr] = content
        if attributes.permissions is not None:
            inode.mode = stat.S_IFMT(inode.mode) | attributes.permissions
            access = inode.xattrs.get(posix_acl.ACCESS)
            if access is not None:
                inode.xattrs[posix_acl.ACCESS] = posix_acl.after_chmod(access, inode.mode)

    # -- stable storage

    @call("fsync directory", changes=True)
    def sync_directory(self, path: LowerPath) -> None:
        directory = self._directory(path)
        for change in self._changes:
            if directory in change.unflushed:
                change.unflushed.clear()  # a change is atomic: one of its directories is enough

    @call("fsync entry", changes=True)
    def sync_entry(self, path: LowerPath) -> None:
        inode = self._find(path)
        inode.safe = inode.as_bytes()

    @call("sync file systems", changes=True)
    def sync_file_systems(self, paths: Iterable[LowerPath]) -> None:
        for change in self._changes:
            change.unflushed.clear()

    # -- staging

    @call("create staging", changes=True)
    def create_staging(self, name: str) -> int:
        if self._is_there(self.staging_path(name)):
            self._remove(self.staging_path(name))
        inode = self._inode(stat.S_IFREG | 0o600)
        inode.is_only_copy = name.startswith(OVERFLOW_PREFIX)
        self._place(self.staging_path(name), inode)
        return self._descriptor(inode)

    @call("open staging")
    def open_staging(self, name: str) -> int:
        return self._descriptor(self._find(self.staging_path(name)))

    def is_staging_area(self, path: LowerPath) -> bool:
        return False

    def stage_near(self, name: str, directory: LowerPath) -> str:
        return name

    def bring_near(self, name: str, target: LowerPath) -> str:
        raise error(errno.EXDEV)

    def staging_path(self, name: str) -> LowerPath:
        return (*self._staging, name.encode())

    def kept_path(self, path: LowerPath = ()) -> LowerPath:
        return self._kept

    @call("remove staging", changes=True)
    def remove_staging(self, name: str) -> None:
        if self._is_there(self.staging_path(name)):
            self._remove(self.staging_path(name))

    def list_kept(self) -> list[LowerPath]:
        return sorted((*self._kept, name) for name in self._find(self._kept).children)

    def staged_alone(self) -> None:
        """What staging files have is nowhere else from now on."""
        for inode in self._find(self._staging).children.values():
            inode.is_only_copy = True

    @call("list staging")
    def list_staging(self) -> list[str]:
        return [name.decode() for name in self._find(self._staging).children]

    # -- descriptors

    def is_only_copy(self, what: object) -> bool:
        """Whether a descriptor's bytes, or those that a staging file is made for, may be nowhere
        else.
        """
        if isinstance(what, str):
            return what.startswith(OVERFLOW_PREFIX)
        inode = self.descriptors.get(what) if isinstance(what, int) else None
        return inode is not None and inode.is_only_copy

    def _open(self, fd: int) -> Inode:
        try:
            return self.descriptors[fd]
        except KeyError:
            raise error(errno.EBADF) from None

    @call("read")
    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        data = self._open(fd).content[offset : offset + len(buffer)]
        buffer[: len(data)] = data
        return len(data)

    @call("write", changes=True)
    def write(self, fd: int, data: memoryview, offset: int) -> int:
        inode = self._open(fd)
        content = inode.content
        self._need(offset + len(data) - len(content))
        content.extend(bytes(max(0, offset - len(content))))
        content[offset : offset + len(data)] = data
        self._written(inode)
        return len(data)

    def _written(self, inode: Inode) -> None:
        inode.written()
        inode.mtime_ns = self._now_ns()
        inode.ctime_ns = inode.mtime_ns
        if self._is_visible(inode):
            self._changed()

    def make_room(self, fd: int, size: int) -> bool:
        self._need(size - len(self._open(fd).content))
        return False

    def expect_bulk(self, fd: int) -> None:
        """Nothing to prepare."""

    def cached_bytes(self, fd: int) -> int | None:
        """No page cache to look into."""
        return None

    def noted(self, fd: int) -> Note | None:
        return _note(self._open(fd))

    def begin_write_out(self, fd: int, offset: int, count: int) -> None:
        """Nothing is held back."""

    @call("truncate", changes=True)
    def truncate(self, fd: int, size: int) -> None:
        inode = self._open(fd)
        self._need(size - len(inode.content))
        del inode.content[size:]
        inode.content.extend(bytes(size - len(inode.content)))
        self._written(inode)

    @call("fsync", changes=True)
    def sync(self, fd: int) -> None:
        inode = self._open(fd)
        inode.safe = inode.as_bytes()

    def forget_pages(self, fd: int) -> None:
        """There are none."""

    @call("fstat")
    def stat_fd(self, fd: int) -> LowerStat:
        return self._stat(self._open(fd))

    def close(self, fd: int) -> None:
        self.descriptors.pop(fd, None)

    # -- own files

    def own_content(self, names: LowerPath) -> bytes | None:
        """What is there now, as anybody can see; None: nothing."""
        try:
            return self._find((OWN, *names)).as_bytes()
        except OSError:
            return None

    @call("read own")
    def read_own(self, names: LowerPath) -> bytes:
        return self._find((OWN, *names)).as_bytes()

    @call("write own", changes=True)
    def write_own(self, names: LowerPath, content: bytes) -> None:
        if names[0] == MIRRORS:
            self._make_own((OWN, MIRRORS))
        inode = self._inode(stat.S_IFREG | 0o644)
        inode.content[:] = content
        inode.written()
        self._directory((OWN, *names[:-1])).children[names[-1]] = inode

    def fence_own_files(self) -> None:
        """Nobody takes a log over here."""

    @call("remove own", changes=True)
    def remove_own(self, names: LowerPath) -> None:
        self._find((OWN, *names[:-1])).children.pop(names[-1], None)

    @call("list own")
    def list_own(self, names: LowerPath) -> list[bytes]:
        return sorted(self._find((OWN, *names)).children)

    @call("overwrite own", changes=True)
    def overwrite_own(self, names: LowerPath, content: bytes) -> bool:
        directory = self._directory((OWN, *names[:-1]))
        if names[-1] in directory.children:
            self._find((OWN, *names)).content[:] = content
            self._find((OWN, *names)).written()
        return names[-1] in directory.children

    @call("rename own", changes=True)
    def rename_own(self, names: LowerPath, new_names: LowerPath) -> None:
        inode = self._find((OWN, *names))
        del self._directory((OWN, *names[:-1])).children[names[-1]]
        self._directory((OWN, *new_names[:-1])).children[new_names[-1]] = inode

    def list_own_files(self, names: LowerPath) -> list[bytes]:
        return self.list_own(names)

    # -- calls on descriptors past `Lower` (`virtual.DESCRIPTOR_CALLS`)

    @call("read")
    def pread(self, fd: int, size: int, offset: int) -> bytes:
        return bytes(self._open(fd).content[offset : offset + size])

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return self.read(fd, memoryview(buffers[0]), offset)

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        return self.write(fd, memoryview(data), offset)

    def fsync(self, fd: int) -> None:
        self.sync(fd)

    fdatasync = fsync

    def ftruncate(self, fd: int, size: int) -> None:
        self.truncate(fd, size)

    def fstat(self, fd: int) -> SimpleNamespace:
        st = self._stat(self._open(fd))
        fields = {f"st_{name}": value for name, value in st._asdict().items()}
        return SimpleNamespace(**fields, st_dev=st.device)

    def lseek(self, fd: int, offset: int, whence: int) -> int:
        size = len(self._open(fd).content)
        if offset >= size:
            raise error(errno.ENXIO)
        return offset if whence == os.SEEK_DATA else size

    def dup(self, fd: int) -> int:
        return self._descriptor(self._open(fd))

    def posix_fadvise(self, fd: int, *advice: int) -> None:
        """Taken note of."""


def _give_acl(inode: Inode, value: bytes) -> None:
    """The mode goes with it; one that says no more is none."""
    inode.mode = inode.mode & ~0o777 | posix_acl.mode_bits(value)
    inode.xattrs.pop(posix_acl.ACCESS, None)
    if posix_acl.says_more(value):
        inode.xattrs[posix_acl.ACCESS] = value


def _note(inode: Inode) -> Note | None:
    value = inode.xattrs.get(b"user.acpfs.xxh3")
    return None if value is None else Note.decode(value)


def _torn(inode: Inode, chance: random.Random) -> bytes:
    """A content that a loss of power leaves."""
    now = inode.as_bytes()
    if inode.safe == now or (inode.safe is None and not now):
        return now
    return chance.choice((inode.safe or b"", now[: len(now) // 2], bytes(len(now))))
