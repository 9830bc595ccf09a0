"""Who may commit the log of a node, and how everybody before is kept out: terms, claims, and the
fence around earlier terms.

A *term* is a number of which one process at most is the owner. The first one is 0, and needs no
file; each later one belongs to whoever made `.acpfs/claims/<node>+<term>`. Each has a staging
directory of its own, in the top and in every area: `staging/<node>` in term 0, then
`staging/<node>+<term>`. It is made once, by the owner, which looks for a newer claim before it uses
it, and never again. The *fence* of a later term moves what is in there into its own, and removes
it. From then on the storage refuses every call that names it, however late, as servers and kernels
go by the directory's inode: docs/internals/terms.md. (`+`, as node ids have none: in
`a.1` one could not see where the id ends.)

Decides nothing about when somebody is lost. Thread-safe; every method may block.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import threading
from collections.abc import Iterator
from typing import NamedTuple

from acpfs.backing.areas import OWN, decode, make_private
from acpfs.backing.lower import LowerPath
from acpfs.backing.quirks import NO_DIRECTORY_SYNC
from acpfs.backing.syscalls import Opener
from acpfs.runtime.given import Runtime

CLAIMS = b"claims"
STAGING = b"staging"
CLAIM_BYTES_MAX = 4096
ROUNDS_MAX = 100
"""So often what came late into a directory is moved out of it, before somebody must try again."""
BAR = b"""The staging files of this node are in another directory beside this file, whose name has
the node's term: an acpfs that knows no terms must not mount under this node id.
"""
"""What lies where an older acpfs would make a staging directory."""
_NAME = re.compile(rb"(.+?)(?:\+([1-9][0-9]{0,17}))?", re.DOTALL)
_TEMPORARY = re.compile(rb"\.(.+)\.[0-9a-f]{8}", re.DOTALL)
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class TermClaim(NamedTuple):
    """Of the log of a node, as its file says."""

    term: int
    by: str
    """Node id of who made it; "": it is not whole, so nobody has this term."""
    at: float = 0.0
    """By the wall clock of who made it."""


class SupersededError(OSError):
    """Somebody else has claimed the log: nothing of it may be committed here."""


def name_in_term(node: bytes, term: int) -> bytes:
    """What a node's staging directory and claim are called."""
    return b"%s+%d" % (node, term) if term else node


def node_and_term(name: bytes) -> tuple[bytes, int]:
    """Inverse of `name_in_term`."""
    found = _NAME.fullmatch(name)
    return (found[1], int(found[2] or 0)) if found is not None else (name, 0)


def registered_areas(opener: Opener, node: bytes) -> set[LowerPath]:
    """Roots of the areas that a node has made, or was about to make."""
    try:
        text = _read(opener, (OWN, b"areas", node), 1 << 24).decode("ascii", "replace")
    except FileNotFoundError:
        return set()
    return {root for line in text.split("\n") if line and (root := decode(line))}


def newest_claim(opener: Opener, node: bytes) -> TermClaim | None:
    """None: the log was never claimed.

    Raises:
        OSError: that cannot be told now.
    """
    for _again in range(ROUNDS_MAX):
        terms = [
            term
            for name in _list(opener, (OWN, CLAIMS))
            for whose, term in (node_and_term(name),)
            if whose == node and term
        ]
        if not terms:
            return None
        with contextlib.suppress(FileNotFoundError):  # a newer one has come, and this one is gone
            return _claim_of(opener, node, max(terms))
    raise OSError(errno.EBUSY, "claims come and go")


def _claim_of(opener: Opener, node: bytes, term: int) -> TermClaim:
    content = _read(opener, (OWN, CLAIMS, name_in_term(node, term)), CLAIM_BYTES_MAX)
    with contextlib.suppress(ValueError):
        found = json.loads(content)
        if isinstance(found, dict) and isinstance(found.get("by"), str):
            at = found.get("at")
            return TermClaim(term, found["by"], float(at) if isinstance(at, int | float) else 0.0)
    return TermClaim(term, "")


class NodeTerms:
    """The terms of one node's log, as its owner or somebody who claims it sees them."""

    def __init__(self, opener: Opener, node_id: str, runtime: Runtime, by: str = "") -> None:
        """`by`: who would own it; the node itself where that is left out."""
        self._opener = opener
        self._node = node_id.encode()
        self._by = by or node_id
        self._clock = runtime.clock
        self._chance = runtime.chance
        self._lock = threading.RLock()
        """While a term begins nobody uses staging files: where they are changes."""
        self._term = -1
        """-1: not known yet."""
        self._superseded: TermClaim | None = None

    # -- the owner's

    def name(self) -> bytes:
        """Of the staging directory of this term.

        Raises:
            OSError: SupersededError; or it cannot be told now.
        """
        with self._lock:
            if self._superseded is not None:
                raise self._error(self._superseded)
            if self._term < 0:  # a later worker: it asks the storage when it needs it first
                self._take_up()
            return name_in_term(self._node, self._term)

    @property
    def taken_over_by(self) -> str:
        """Who has claimed the log, as far as that was found out; "": nobody else."""
        superseded = self._superseded
        return "" if superseded is None else superseded.by

    def begin(self) -> None:
        """At a mount: go on in the newest term, in which its owner may have been killed at any
        line, or begin the first one.

        Raises:
            OSError: SupersededError: the log is somebody else's; and what calls raise.
        """
        with self._lock:
            if newest_claim(self._opener, self._node) is not None or not self._begin_first():
                self._take_up()

    def _begin_first(self) -> bool:
        """Whether this is term 0, with a directory. As all owners, it looks before it uses that."""
        try:
            make_private(self._opener, (OWN,), STAGING, self._node, self._chance)
        except NotADirectoryError:  # claims were removed, and what they have done was not
            self._claim_next()
            return True
        if newest_claim(self._opener, self._node) is not None:
            return False
        self._term = 0
        return True

    def _take_up(self) -> None:
        claim = newest_claim(self._opener, self._node)
        if claim is None:
            self._term = 0
            return
        self._check_ours(claim)
        if claim.by and self._is_there(claim.term):
            self._fence(claim.term)
            self._term = claim.term
        else:  # killed between claim and directory, or it was removed: that is never made again
            self._claim_next()

    def look(self) -> None:
        """See that nobody has claimed the log since, before something is used that was made, or
        counts as missing.

        Raises:
            OSError: SupersededError; and what calls raise.
        """
        with self._lock:
            claim = newest_claim(self._opener, self._node)
            if claim is not None and claim.term > self._term:
                self._take_up()

    def lost(self, name: bytes) -> None:
        """The staging directory of that name is gone. Claims are listed before anything else; where
        nobody has a newer one, a person has removed the directory, and the next term begins.

        Raises:
            OSError: SupersededError; and what calls raise: then it is to be called again.
        """
        with self._lock:
            if self._superseded is None and name != name_in_term(self._node, self._term):
                return  # the next term has begun meanwhile
            claim = newest_claim(self._opener, self._node)
            if claim is not None and claim.term > self._term:
                self._take_up()
            else:
                self._claim_next()

    def _check_ours(self, claim: TermClaim) -> None:
        if claim.by not in ("", self._by):
            self._superseded = claim
            raise self._error(claim)

    def _error(self, claim: TermClaim) -> SupersededError:
        return SupersededError(
            errno.ESTALE,
            f"node {claim.by} has taken over the log of node {self._node.decode()} "
            f"(term {claim.term})",
        )

    # -- claim and fence

    def take(self) -> int:
        """Claim the next term, whoever had the last one, and fence all before it; returns it.

        Raises:
            OSError: EAGAIN where another claim came between; and what calls raise. Nothing of it is
                undone then: the next claim goes on from there.
        """
        with self._lock:
            self._superseded = None
            return self._claim_next()

    def take_over(self) -> None:
        """`take`, unless the newest claim is ours already: an earlier attempt went so far.

        Raises:
            OSError: as `take`.
        """
        with self._lock:
            claim = newest_claim(self._opener, self._node)
            if claim is None or claim.by != self._by:
                self.take()

    def _claim_next(self) -> int:
        claim = newest_claim(self._opener, self._node)
        directories = [term for name, term in self._directories(()) if name]
        term = max([self._term, claim.term if claim else 0, *directories]) + 1
        if not self._claim(term):
            raise OSError(errno.EAGAIN, "another claim came between")
        self._make((), term)
        self._fence(term)
        self._term = term
        self._forget_claims_before(term)
        return term

    def _claim(self, term: int) -> bool:
        """Whether this is its owner, by what lies under the name afterwards: a client of NFS may
        repeat the call, and is told then that there is one, and some storages count no links.
        """
        name = name_in_term(self._node, term)
        said = {"by": self._by, "at": self._clock.wall(), "token": self._chance.token(8)}
        content = json.dumps(said).encode() + b"\n"
        temporary = b".%s.%s" % (name, self._chance.token(4).encode())
        dir_fd = self._open_claims()
        try:
            _write_new(dir_fd, temporary, content)
            try:
                os.link(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
            except FileExistsError:
                pass
            except OSError:  # no hard links; and if it was made all the same, this finds it there
                with contextlib.suppress(FileExistsError):
                    _write_new(dir_fd, name, content)
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=dir_fd)
            _sync(dir_fd)
        finally:
            os.close(dir_fd)
        with contextlib.suppress(FileNotFoundError):
            found = _read(self._opener, (OWN, CLAIMS, name), CLAIM_BYTES_MAX)
            return found == content and self._is_newest(term)
        return False

    def _is_newest(self, term: int) -> bool:
        claim = newest_claim(self._opener, self._node)
        return claim is not None and claim.term == term and claim.by == self._by

    def _open_claims(self) -> int:
        for path in ((OWN,), (OWN, CLAIMS)):
            above = self._opener.open_directory(path[:-1])
            try:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(path[-1], 0o755, dir_fd=above)
            finally:
                os.close(above)
        return self._opener.open((OWN, CLAIMS), _DIRECTORY)

    def _forget_claims_before(self, term: int) -> None:
        """Whoever makes such a claim late finds that it is not the newest."""
        with contextlib.suppress(OSError):
            dir_fd = self._open_claims()
            try:
                for name in os.listdir(dir_fd):
                    temporary = _TEMPORARY.fullmatch(os.fsencode(name))
                    whose, of_term = node_and_term(temporary[1] if temporary else os.fsencode(name))
                    if whose == self._node and 0 < of_term < term:
                        os.unlink(name, dir_fd=dir_fd)
            finally:
                os.close(dir_fd)

    # -- directories

    def _make(self, root: LowerPath, term: int) -> None:
        """The staging directory of a term that is ours. It is made after the claim, and the claims
        are listed after that: whoever claims later finds it when it fences, or is found here, and
        then nothing uses it.
        """
        name = name_in_term(self._node, term)
        make_private(self._opener, (*root, OWN), STAGING, name, self._chance)
        if not self._is_newest(term):
            raise OSError(errno.EAGAIN, "another claim came between")

    def _is_there(self, term: int) -> bool:
        try:
            fd = self._opener.open_directory((OWN, STAGING, name_in_term(self._node, term)))
        except FileNotFoundError:
            return False
        os.close(fd)
        return True

    def _directories(self, root: LowerPath) -> list[tuple[bytes, int]]:
        """Staging directories of the node in the top or an area, by name and term."""
        found = [(name, node_and_term(name)) for name in _list(self._opener, (*root, OWN, STAGING))]
        return [(name, term) for name, (whose, term) in found if whose == self._node]

    def _fence(self, term: int) -> None:
        """Remove the staging directories of all earlier terms; what is in them is in that of this
        term afterwards.

        The register of areas is read now, after the claim: an owner that makes an area registers it
        first, and looks for claims before it uses it. The top comes last, as by it `leftovers`
        finds what there is to clear.
        """
        for root in (*sorted(registered_areas(self._opener, self._node)), ()):
            for name, earlier in self._directories(root):
                if earlier < term:
                    self._empty(root, name, term)

    def _empty(self, root: LowerPath, name: bytes, term: int) -> None:
        """Move everything out of a directory, and remove it. Nothing where it is gone, or a bar."""
        own = (*root, OWN)
        holder = self._opener.open_directory((*own, STAGING))
        try:
            for _again in range(ROUNDS_MAX):
                if not self._empty_once(holder, name, root, term):
                    break
            else:
                raise OSError(errno.EBUSY, "files keep coming into an earlier staging directory")
            if name == self._node:
                with contextlib.suppress(FileExistsError):
                    _write_new(holder, name, BAR)
        finally:
            os.close(holder)

    def _empty_once(self, holder: int, name: bytes, root: LowerPath, term: int) -> bool:
        """Whether it may still be there."""
        try:
            old_fd = os.open(name, _DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=holder)
        except (FileNotFoundError, NotADirectoryError):
            return False  # by another one that claims, or an earlier attempt; a bar
        try:
            self._move_all(old_fd, root, term)
        finally:
            os.close(old_fd)
        with contextlib.suppress(FileNotFoundError), _not_empty():
            os.rmdir(name, dir_fd=holder)
        return True

    def _move_all(self, old_fd: int, root: LowerPath, term: int) -> None:
        names = os.listdir(old_fd)
        if not names:
            return
        if root:  # that of the top was made with the term, and nothing makes it anew
            self._make(root, term)
        try:
            new = (*root, OWN, STAGING, name_in_term(self._node, term))
            new_fd = self._opener.open(new, _DIRECTORY)
        except FileNotFoundError as error:
            raise OSError(errno.EAGAIN, "a later term has begun") from error
        try:
            for name in names:
                self._move(old_fd, new_fd, name)
            _sync(new_fd)
        finally:
            os.close(new_fd)

    def _move(self, old_fd: int, new_fd: int, name: str) -> None:
        """What has the name in the new one was moved there first: that is what the log means."""
        target = name
        with contextlib.suppress(FileNotFoundError):
            os.stat(name, dir_fd=new_fd, follow_symlinks=False)
            target = f"late-{self._chance.token(8)}"
        with contextlib.suppress(FileNotFoundError):
            os.rename(name, target, src_dir_fd=old_fd, dst_dir_fd=new_fd)


@contextlib.contextmanager
def _not_empty() -> Iterator[None]:
    """Something came late into the directory that is removed: it is moved, too, and tried again."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def _list(opener: Opener, path: LowerPath) -> list[bytes]:
    try:
        fd = opener.open(path, _DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return []
    try:
        return sorted(os.fsencode(name) for name in os.listdir(fd))
    finally:
        os.close(fd)


def _read(opener: Opener, path: LowerPath, size: int) -> bytes:
    fd = opener.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return b""
        with open(fd, "rb", closefd=False) as file:
            return file.read(size)
    finally:
        os.close(fd)


def _write_new(dir_fd: int, name: bytes, content: bytes) -> None:
    with open(os.open(name, _NEW, 0o644, dir_fd=dir_fd), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in NO_DIRECTORY_SYNC:
            raise
