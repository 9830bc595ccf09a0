"""What the backing directory has, as far as the file system needs to know it, and how old that
knowledge is.

The only place of the file system that asks the lower layer about names and attributes. Knowledge is
good for `attr_timeout_s`; older knowledge is renewed, and used as it is when the backing directory
does not answer within `patience_s` ("absent" and "not known" are different answers: only ENOENT
means absent). Answers that a commit may have overtaken are asked for again.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from acpfs.backing import posix_acl
from acpfs.backing.calls import CallPool
from acpfs.backing.lower import Lower, LowerEntry, LowerPath, LowerStat
from acpfs.backing.progress import Progress
from acpfs.backing.read_rate import ReadRate
from acpfs.config import Settings
from acpfs.filesystem.acls import HandedOn
from acpfs.filesystem.ahead import ListingsAhead
from acpfs.filesystem.beneath import Beneath
from acpfs.filesystem.bursts import Bursts
from acpfs.filesystem.content.contents import Contents
from acpfs.filesystem.content.whole_reads import There, WholeReads
from acpfs.filesystem.first_sight import FirstSight
from acpfs.filesystem.known_names import Inquiry, KnownName
from acpfs.filesystem.lower_reads import LowerReads
from acpfs.filesystem.nameless import Nameless
from acpfs.filesystem.nodes import Node
from acpfs.filesystem.notices import Notices
from acpfs.filesystem.questions import Questions
from acpfs.filesystem.recognition import NOTHING, Recognition, Seen
from acpfs.filesystem.steps import wait
from acpfs.filesystem.upper import UpperLayer
from acpfs.types import NO_INO, ROOT, Ino, TierId
from acpfs.writeback.evidence.whereabouts import Whereabouts
from acpfs.writeback.log.lower_tree import Place
from acpfs.writeback.log.ops import Op, OpKind
from acpfs.writeback.members.peer_names import PeerNames

HIDDEN = b".acpfs"
"""The one name in the backing directory's top that is acpfs' own."""


class _ReplacedError(OSError):
    """Another file lies at the path."""


@dataclass(frozen=True, slots=True)
class LowerViewStatistics:
    """How often old knowledge had to do."""

    stale_answers: int
    overtaken_answers: int
    checksum_mismatches: int
    """Files that were found not to be what was stored, by whoever read them whole."""


class LowerView:
    """Lookups in the lower layer, turned into nodes."""

    def __init__(
        self,
        settings: Settings,
        upper: UpperLayer,
        lower: Lower,
        calls: CallPool,
        contents: Contents,
        peers: PeerNames,
    ) -> None:
        """`calls`: threads for requests' calls on the backing directory; `peers`: tells whether
        other members live.
        """
        runtime = upper.runtime
        tree = upper.tree
        log = upper.log
        table = upper.table
        lock = upper.lock
        self._now = runtime.clock.now
        self._serial = runtime.clock.serial
        self._settings = settings
        self.lower = lower
        self._there = Whereabouts(lower, tree, log, lock, table.left_as)
        self._calls = calls
        self._tree = tree
        self._log = log
        self._table = table
        self._contents = contents
        self.peers = peers
        tier = upper.tier
        self._tier = tier
        self._lock = lock
        self.beneath = Beneath(table, log, tree)
        self._foreseen: dict[Ino, Future[None]] = {}
        self.read_rate = ReadRate()
        """How fast files of the backing directory were read."""
        self.questions = Questions(settings, calls, tree, lock)
        self._bursts = Bursts(settings.attr_timeout_s, runtime.clock)
        self.ahead = ListingsAhead(
            self._there, calls, tree, table, lock, partial(self._listed, ahead=True)
        )
        self.trusted_since = 0.0  # monotonic, seconds: what was learnt before is asked for anew
        self._recognition = Recognition(self._there, tree, table, lock)
        self._first_sight = FirstSight(table, tree, runtime.clock)
        self.whole = WholeReads(lower, self._there, tier, self.read_rate, runtime.clock)
        self.notices = Notices()
        self.nameless = Nameless(
            self.open_bytes, self.close_later, settings.patience_s, self.notices, runtime
        )
        self.reads = LowerReads(
            self.questions.call,
            self.open_lower,
            self.close_later,
            self.nameless,
            self.read_rate,
            runtime.clock,
        )

    def is_fresh(self, checked_at: float, began: float, since: float = 0.0) -> bool:
        """Whether knowledge is new enough: what a call asked for itself will do, however long that
        took. `since`: nothing older.
        """
        return checked_at >= max(
            since,
            min(began, max(self.trusted_since, self._now() - self._settings.attr_timeout_s)),
        )

    def _inquiry(self) -> Inquiry:
        """Of a question that is about to be asked."""
        return Inquiry(self._now(), self._serial())

    def on_backing(self, ino: Ino) -> bool:
        """Whether the node has a place on the backing directory."""
        return ino in self._tree

    def held(self, node: Node) -> bool:
        """Whether the mount's own idea of the node is the right one, because the backing directory
        has yet to hear of it.
        """
        return (
            node.unlogged
            or node.is_written
            or self._log.is_pending(node.ino)
            or (node.is_dir and self._log.pending_in(node.ino) > 0)
        )

    # -- names

    async def child(self, parent: Node, name: bytes, *, anew: bool = False) -> Ino:
        """The node that a name leads to, 0 for none.

        `anew`: ask the backing directory, however young the knowledge is.
        """
        if not parent.is_dir:
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if parent.ino == ROOT and name == HIDDEN:
            return NO_INO
        asked = False
        began = self._now()
        await self._meet(parent, began, since=began if anew else 0.0)
        while True:
            child = parent.dir.children.get(name)
            if self.is_settled(parent, name, child, began, since=began if anew else 0.0):
                return child.ino if child else NO_INO
            if (
                not asked
                and (child is None or not child.ino)
                and self._bursts.is_worth_listing(parent)
            ):
                asked = True
                parent.dir.misses = 0
                await self._list(parent)
                continue
            if (
                not asked
                and child is not None
                and child.ino
                and (following := self._bursts.following(parent, name))
            ):
                asked = True
                if not await self._look_at(parent, following, known=True):
                    return self._stale(parent, name)
                self._bursts.took(parent, self._now() - began)
                continue
            epoch = self._tree.epoch
            inquiry = self._inquiry()
            late = partial(self._learn_asked, parent, name, parent.dir.notes, inquiry)
            path = self._tree.path_at(parent.ino, name)
            assert path is not None
            known = parent.dir.knows(name)
            answer = await self.questions.renew(
                "lookup", self._recognition.look, path, known=known, late=late
            )
            if answer is None:
                return self._stale(parent, name)
            if self.questions.overtaken(epoch):
                if not await self.questions.at_rest(known=known):
                    return self._stale(parent, name)
                continue
            self._learn_asked(parent, name, parent.dir.notes, inquiry, answer)

    def _learn_asked(
        self, parent: Node, name: bytes, notes: int, inquiry: Inquiry, seen: Seen
    ) -> None:
        """Take over the answer about a name, unless more was learnt of it since: it was made,
        committed and (by `notes`) forgotten, say.
        """
        child = parent.dir.children.get(name)
        newer = (
            parent.dir.notes != notes
            if child is None
            else child.pins or child.checked >= inquiry.serial
        )
        if newer or self._recognition.is_in_doubt(seen, inquiry.serial):
            return  # who still wants to know asks anew
        if self._table.get(parent.ino) is parent and parent.ino in self._tree:
            self.learn(parent, name, seen, inquiry)

    def is_settled(
        self, parent: Node, name: bytes, child: KnownName | None, began: float, since: float
    ) -> bool:
        """Whether the answer is known without asking."""
        if (child is not None and child.pins) or parent.ino not in self._tree:
            return True
        listed = self._is_listed(parent, began, since)
        if child is not None:
            return self.is_fresh(child.checked_at, began, since) or (
                listed and not child.ino and name not in parent.dir.listing
            )
        return listed and name not in parent.dir.listing

    def _is_listed(self, parent: Node, began: float, since: float = 0.0) -> bool:
        """Whether the listing is new enough to answer in place of the backing directory."""
        return not parent.dir.listed_ahead and self.is_fresh(parent.dir.listed_at, began, since)

    def _stale(self, parent: Node, name: bytes) -> Ino:
        """The answer by older knowledge, where there was some when it was asked for anew."""
        child = parent.dir.children.get(name)
        if (
            child is None and name in parent.dir.listing
        ):  # it was forgotten while the question was out
            raise OSError(errno.EIO, "listed, but the backing directory does not answer")
        return child.ino if child is not None else NO_INO

    def learn(self, parent: Node, name: bytes, seen: Seen, inquiry: Inquiry) -> None:
        """Take over what the backing directory said about a name, unless own operations on it, or
        on its node, came between.
        """
        child = parent.dir.children.get(name)
        node = self._table.get(child.ino) if child is not None and child.ino else None
        # `settled`: our own operation left the log after the question, which may have been answered
        # before that was carried out
        if (child is not None and (child.pins or child.settled > inquiry.serial)) or (
            node is not None and node.settled > inquiry.serial
        ):
            self.questions.overtaken_answers += 1
            return
        if seen.st is None:
            self._lost(parent, name, node)
        elif node is None or not self.held(
            node
        ):  # else its commit is under way, or the mount's file takes the place when it is closed
            self._found(parent, name, node, seen.st, seen.twin, inquiry)
        child = parent.dir.children.get(name) or self._table.set_child(parent.ino, name, NO_INO)
        child.checked_at = self._now()
        child.checked = self._serial()
        if not (child.ino or child.pins):
            self._table.known_absent(parent.ino, name)

    def _found(
        self,
        parent: Node,
        name: bytes,
        known: Node | None,
        st: LowerStat,
        twin: Ino,
        inquiry: Inquiry,
    ) -> None:
        node = self._recognition.node(
            known, st, twin, inquiry.serial, in_use=known is not None and known.handles > 0
        )
        if self._tree.node_at(parent.ino, name) != node.ino:
            node.unseen_links = max(0, node.unseen_links - 1)
            self._tree.add(node.ino, parent.ino, name)
        self._table.set_child(parent.ino, name, node.ino)
        self.compare(node, st)
        if known is not None and known is not node:
            if not known.names:
                self._table.unbind_lower(known)
            self.reap(known)

    def _is_needed(self, node: Node) -> bool:
        """Whether operations still rely on a node's place: it was removed from outside, and the
        drain will make it again.
        """
        # what is open may be written to yet
        return any(
            self.held(one) or (one is not node and one.open_writers)
            for one in self._table.tree(node)
        )

    def _lost(self, parent: Node, name: bytes, node: Node | None) -> None:
        if node is not None and self._is_needed(node):
            return
        self._tree.remove(parent.ino, name)
        self._table.set_child(parent.ino, name, NO_INO)
        if node is not None and node.lookups:
            self.notices.lost(parent.ino, name, node.ino)
        if node is not None and not self.held(node):
            if not node.names:
                self._table.unbind_lower(node)
            self.reap(node)

    def compare(self, node: Node, st: LowerStat) -> None:
        """Take over attributes where the backing directory's entry is not what it was; outdated
        content leaves RAM.
        """
        node.checked_at = self._now()
        node.lower_device = st.device
        node.checked = self._serial()
        if self.held(node):
            return
        if not node.is_dir:
            self._count_links(node, st.nlink)
        if node.identity == st.identity():
            return
        if node.is_file and node.body.has_local_bytes:
            self._contents.drop(node)
        if node.identity is None or node.identity[:3] != st.identity()[:3]:
            node.keep_cache = False
        node.xattrs = None
        node.adopt(st)
        self._table.bind_lower(node, st)
        if node.lookups:
            self.notices.changed(node.ino)

    def _count_links(self, node: Node, nlink: int) -> None:
        unseen = max(0, nlink - self._tree.places_count(node.ino))
        if unseen != node.unseen_links:
            node.unseen_links = unseen
            self._table.changed(node)

    # -- attributes

    async def renew(self, node: Node) -> None:
        """Make sure that the node's attributes are not older than allowed.

        Raises:
            OSError: ENOENT when the node is gone from the backing directory; ESTALE when another
                lies in its place.
        """
        began = self._now()
        while not (self.held(node) or self.is_fresh(node.checked_at, began)):
            epoch = self._tree.epoch
            inquiry = self._inquiry()
            place = self._tree.place(node.ino)
            path = self._tree.path(node.ino)
            if path is None:
                return  # deleted, but still open
            late = partial(self._compare_asked, node, inquiry)
            answer = await self.questions.renew(
                "getattr", self._recognition.look, path, known=True, late=late
            )
            if answer is None:
                return
            if self.questions.overtaken(epoch):
                if not await self.questions.at_rest(known=True):
                    return
                continue
            if self.held(node) or node.settled > inquiry.serial:
                self.questions.overtaken_answers += 1
                continue
            st = answer.st
            if (
                st is not None
                and stat.S_IFMT(st.mode) == stat.S_IFMT(node.mode)
                and (node.lower_ino in (0, st.ino) or node.is_dir)
            ):
                self.compare(node, st)
            elif st is None or stat.S_IFMT(st.mode) != stat.S_IFMT(node.mode):
                self._moved_away(node, place, NOTHING, inquiry, errno.ENOENT)
            else:
                self._moved_away(
                    node, place, answer, inquiry, errno.ESTALE
                )  # replaced: the kernel looks the name up again

    def _moved_away(
        self, node: Node, place: Place | None, seen: Seen, inquiry: Inquiry, number: int
    ) -> None:
        """A name of the node leads to nothing, or to another by now; an error, when that was its
        only one.
        """
        if place is not None and (seen.st is not None or self._tree.places_count(node.ino) > 1):
            self.learn(self._table[place[0]], place[1], seen, inquiry)
        if node.is_dir or self._tree.place(node.ino) in (None, place):
            raise OSError(number, os.strerror(number))

    def _compare_asked(self, node: Node, inquiry: Inquiry, seen: Seen) -> None:
        """Take over attributes that came late; a file that is another one by now is left to the
        next who asks.
        """
        st = seen.st
        if (
            st is None
            or node.checked >= inquiry.serial
            or node.settled > inquiry.serial
            or self._table.get(node.ino) is not node
        ):
            return
        if stat.S_IFMT(st.mode) == stat.S_IFMT(node.mode) and (
            node.is_dir or node.lower_ino in (0, st.ino)
        ):
            self.compare(node, st)

    async def load_xattrs(self, node: Node) -> dict[bytes, bytes]:
        if node.xattrs is None:
            xattrs: dict[bytes, bytes] = {}
            try:
                xattrs = await self.questions.at_place(
                    node, lambda path: self.questions.call("xattrs", self._there.xattrs, path)
                )
            except OSError:
                if self.path(node) is not None:
                    raise
            if node.xattrs is None:
                return self._learn_xattrs(node, xattrs)
        return node.xattrs

    async def handed_on(self, directory: Node) -> HandedOn:
        """What the directory hands on to what is made in it; whether it does is not known only
        while the backing directory hangs.
        """
        if not self.lower.features.acls:
            return HandedOn()
        if directory.xattrs is None and not await self.knows_acls(directory):
            return HandedOn(is_known=False)
        return HandedOn((directory.xattrs or {}).get(posix_acl.DEFAULT))

    async def knows_acls(self, node: Node) -> bool:
        """Have the node's extended attributes loaded; False: the backing directory hangs, or does
        not say.

        Slow is not hung: an answer that would let nobody in is given only where there is none to
        wait for.
        """
        if node.xattrs is not None or self._tree.path(node.ino) is None:
            return True
        rounds = itertools.count()
        most = self._settings.backing_timeout_s / self._settings.patience_s

        def goes_on() -> int | None:
            """Another number each time, as long as there is something to wait for."""
            number = next(rounds)
            return None if number > most or self._calls.health.is_stuck() else number

        async def ask(path: LowerPath) -> dict[bytes, bytes]:
            # not `foresee_xattrs`: who loses patience with a call that others wait for, too, would
            # break off theirs
            call = self._calls.submit("xattrs", self._there.xattrs, path)
            patience_s = self._settings.patience_s
            return await wait(self._calls.patient(call, patience_s, when_stuck=0.0, moved=goes_on))

        try:
            xattrs = await self.questions.at_place(node, ask)
        except InterruptedError:
            raise
        except FileNotFoundError:
            return True
        except OSError:
            return self._tree.path(node.ino) is None
        if node.xattrs is None:
            self._learn_xattrs(node, xattrs)
        return True

    def _learn_xattrs(self, node: Node, xattrs: dict[bytes, bytes]) -> dict[bytes, bytes]:
        """The next worker knows those of a directory too: what fsync means below it decides about
        lanes.
        """
        node.xattrs = xattrs
        if node.is_dir:
            self._table.changed(node)
        return xattrs

    async def peek_xattrs(self, node: Node) -> dict[bytes, bytes]:
        """The node's extended attributes, or none when they are not known and the backing directory
        does not answer soon.
        """
        with contextlib.suppress(OSError):
            while (future := self.foresee_xattrs(node)) is not None:
                await wait(self._calls.patient(future, self._settings.patience_s, when_stuck=0.0))
                if not await self.questions.at_rest(known=True):
                    break
        return node.xattrs or {}

    def foresee_xattrs(self, node: Node) -> Future[None] | None:
        """Begin to load a node's extended attributes, if they are not known; None: nothing to wait
        for.
        """
        if node.xattrs is not None:
            return None
        path = self._tree.path(node.ino)
        if path is None:
            return None
        future = self._foreseen.get(node.ino)
        if future is None or future.done():  # done before it was taken out: no thread ever began it
            future = self._calls.submit(
                "xattrs", self._foresee_xattrs, node, path, self._tree.epoch
            )
            self._foreseen[node.ino] = future
        return future

    def _foresee_xattrs(self, node: Node, path: LowerPath, epoch: int) -> None:
        """Leaves them unknown where a commit moved things meanwhile."""
        try:
            xattrs = self._there.xattrs(path)
            with self._lock:
                if not self.questions.overtaken(epoch) and node.xattrs is None:
                    self._learn_xattrs(node, xattrs)
        except OSError:
            with self._lock:
                if not self.questions.overtaken(epoch):
                    raise
        finally:
            with self._lock:
                del self._foreseen[node.ino]

    async def load_target(self, node: Node) -> bytes:
        if not node.target:
            node.target = await self.questions.at_place(
                node, lambda path: self.questions.call("readlink", self._there.readlink, path)
            )
        return node.target

    # -- bytes of files that are not in RAM

    def path(self, node: Node) -> LowerPath | None:
        """Where the node lies on the backing directory now."""
        return self._tree.path(node.ino)

    async def look(self, node: Node) -> LowerStat:
        """At what lies there now, whatever a commit moves meanwhile."""
        return await self.questions.at_place(
            node, lambda path: self.questions.call("lstat", self._there.lstat, path)
        )

    async def open_lower(self, node: Node) -> int:
        """A descriptor of the node's file on the backing directory."""
        while True:
            with contextlib.suppress(_ReplacedError):
                return await self.questions.at_place(
                    node, lambda path: self._open_lower(node, path), again=False
                )
            if not node.body.is_cold or self.held(node):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            self._table.ask_anew(node)
            await self.renew(
                node
            )  # another file lies there by now: ESTALE, and the kernel looks the name up again

    async def open_bytes(self, node: Node) -> int:
        """A descriptor of what has the node's bytes on the backing directory: its file, or a
        staging file.
        """
        former = ""
        while node.body.is_overflowed:
            name = node.body.staging
            try:
                return await self.questions.call("open staging", self.lower.open_staging, name)
            except FileNotFoundError:
                if name == former:
                    raise
            former = name
            await self.questions.at_rest(known=False)  # it is being put into place
        return await self.open_lower(node)

    async def _open_lower(self, node: Node, path: LowerPath) -> int:
        future = self._calls.submit("open", self._open_and_look, path)
        try:
            fd, ino = await self.questions.answer("open", future)
        except BaseException:
            future.add_done_callback(self._not_wanted)
            raise
        if ino == node.lower_ino:
            return fd
        self.close_later(fd)
        raise _ReplacedError

    def _open_and_look(self, path: LowerPath) -> tuple[int, int]:
        """A descriptor, and its inode number: asking for that may hang, too."""
        fd = self._there.open_read(path)
        try:
            return fd, self.lower.stat_fd(fd).ino
        except BaseException:
            self.close_later(fd)
            raise

    def _not_wanted(self, opened: Future[tuple[int, int]]) -> None:
        """Whoever asked has gone, or lost patience."""
        if not opened.cancelled() and opened.exception() is None:
            self.close_later(opened.result()[0])

    def close_later(self, fd: int) -> None:
        """Close a descriptor of the backing directory; close may hang too."""
        self._calls.close_later(fd)

    async def read_up(self, path: There, size: int) -> tuple[TierId, LowerStat]:
        """Copy the first `size` bytes of a file, which the caller has reserved, into a new tier
        file; and the entry as it was meanwhile.
        """
        tier_id = self._tier.create()
        progress = Progress()
        try:
            call = self._calls.submit("copy up", self.whole.bring, path, tier_id, size, progress)
            st = await self.questions.answer("copy up", call, progress)
        except BaseException:
            progress.give_up()
            self._tier.discard(tier_id)
            raise
        self._tier.settle(tier_id)
        return tier_id, st

    # -- directories

    async def names(self, parent: Node) -> dict[bytes, LowerEntry | Ino]:
        """All names in a directory: with the node's number where one is known, else with what the
        listing said.
        """
        directory = parent.dir
        began = self._now()
        await self._meet(parent, began)
        while (
            parent.ino in self._tree
            and not self._is_listed(parent, began)
            and await self._list(parent)
        ):
            pass
        # what others have removed is no place any more: of an older listing of it nothing is there
        names: dict[bytes, LowerEntry | Ino] = (
            dict(directory.listing) if parent.ino in self._tree else {}
        )
        for name, child in directory.children.items():
            if child.ino:
                names[name] = child.ino
            elif child.pins or child.checked >= directory.listed:
                names.pop(name, None)
        return names

    async def _list(self, parent: Node) -> bool:
        """Ask for a listing; False when there is no answer.

        One that was overtaken is not taken over.
        """
        directory = parent.dir
        epoch = self._tree.epoch
        notes = directory.notes
        inquiry = self._inquiry()
        known = directory.listed_at >= 0
        take = partial(self._listed, parent, notes, inquiry)
        path = self._tree.path(parent.ino)
        if path is None:
            return False
        try:
            entries = await self.questions.renew(
                "listdir", self._there.listdir, path, known=known, late=take
            )
        except OSError as error:
            # not there at the moment is no answer: the C library takes ENOENT for the end of the
            # listing
            if not self.questions.overtaken(epoch):
                if error.errno == errno.ENOENT and self._is_made_here(parent):
                    return False  # a server has forgotten it, and gets it again (`Recheck`)
                raise
            return await self.questions.at_rest(known=False)
        directory.listing_s = self._now() - inquiry.at
        if entries is None:
            return False
        if self.questions.overtaken(epoch):
            return await self.questions.at_rest(known=known)
        take(entries)
        return True

    def _is_made_here(self, directory: Node) -> bool:
        """Whether its making is not persisted yet."""
        return self._making(directory) is not None

    def _making(self, directory: Node) -> Op | None:
        """What is to make a directory."""
        ops = self._log.pending_of(directory.ino)
        return next((op for op in ops if op.kind is OpKind.MKDIR), None)

    async def _meet(self, directory: Node, began: float, since: float = 0.0) -> None:
        """Find a directory that is made here, and not persisted, where another member has made it,
        too: it is that one, with what is in it.

        `began`, `since`: as for `is_fresh`.
        """
        if directory.ino in self._tree or not self.peers.others:
            return
        making = self._making(directory)
        above = None if making is None else self._table.get(making.parent)
        if making is None or above is None:
            return
        await self._meet(above, began, since)
        while self._may_be_met(directory, making) and not self._is_listed(directory, began, since):
            epoch = self._tree.epoch
            inquiry = self._inquiry()
            path = self._tree.path_at(*making.touches()[0])
            assert path is not None
            met = partial(self._met, directory, making, inquiry)
            seen = await self.questions.renew(
                "lookup", self._recognition.look, path, known=True, late=met
            )
            if seen is None:
                return
            if not self.questions.overtaken(epoch):
                met(seen)
            elif not await self.questions.at_rest(known=True):
                return

    def _may_be_met(self, directory: Node, making: Op) -> bool:
        """Whether what lies under its name is what the directory will be: not something that is to
        be removed or moved away from there first, and not where the directory has left by then.
        """
        parent, name = making.touches()[0]
        above = self._table.get(parent)
        child = above.dir.children.get(name) if above is not None else None
        return (
            self._log.get(making.seq) is making
            and directory.ino not in self._tree
            and (parent == ROOT or parent in self._tree)
            and child is not None
            and (child.ino, child.pins) == (directory.ino, 1)
            and self._tree.node_at(parent, name) is None
            and self._tree.path_at(parent, name) is not None
        )

    def _met(self, directory: Node, making: Op, inquiry: Inquiry, seen: Seen) -> None:
        if not self._may_be_met(directory, making):
            return
        if seen.st is not None and stat.S_ISDIR(seen.st.mode):
            self._tree.add(directory.ino, *making.touches()[0])
        else:
            self._table.listed(directory, {}, inquiry)

    def _listed(
        self,
        parent: Node,
        notes: int,
        inquiry: Inquiry,
        entries: Sequence[LowerEntry],
        *,
        ahead: bool = False,
    ) -> None:
        """Take over a listing, unless a name was forgotten since it was asked for, or a newer one
        has come.
        """
        directory = parent.dir
        if (
            directory.notes != notes
            or directory.listed >= inquiry.serial
            or self._table.get(parent.ino) is not parent
        ):
            return
        self._table.listed(parent, {entry.name: entry for entry in entries}, inquiry, ahead=ahead)
        if self.lower.features.acls:
            # what is known of the directory is gone on with while the backing directory hangs, and
            # to that belongs what it hands on
            self.foresee_xattrs(parent)
        for name, child in list(directory.children.items()):
            if (
                child.ino
                and not child.pins
                and name not in directory.listing
                and child.checked < inquiry.serial
            ):
                self.learn(parent, name, NOTHING, inquiry)

    def listed_entry(self, parent: Node, name: bytes) -> LowerEntry | None:
        """What the listing says of a name; nothing of a directory that has left the backing
        directory.
        """
        return parent.dir.listing.get(name) if parent.ino in self._tree else None

    async def fill(self, parent: Node, names: Sequence[bytes], *, whole: bool = False) -> None:
        """Turn listed names into nodes, with one call for all; but for `whole`, those for which
        there is no answer soon stay names.
        """
        unknown = [
            n for n in names if (c := parent.dir.children.get(n)) is None or not (c.pins or c.ino)
        ]
        await self._look_at(
            parent, unknown, known=not whole
        )  # a list of names needs no attributes: whoever wants them asks for them

    async def _look_at(self, parent: Node, names: Sequence[bytes], *, known: bool) -> bool:
        """Ask about names of a directory with one call; False when there is no answer (soon, where
        it is `known` what to go on with).
        """
        while names and parent.ino in self._tree:
            epoch = self._tree.epoch
            inquiry = self._inquiry()
            path = self._tree.path(parent.ino)
            assert path is not None
            late = partial(self._fill, parent, names, parent.dir.notes, inquiry)
            answers = await self.questions.renew(
                "lstat many", self._recognition.look_at_all, path, names, known=known, late=late
            )
            if answers is None:
                return False
            if self.questions.overtaken(epoch):
                if not await self.questions.at_rest(known=known):
                    return False
                continue
            self._fill(parent, names, parent.dir.notes, inquiry, answers)
            return True
        return True

    def _fill(
        self,
        parent: Node,
        names: Sequence[bytes],
        notes: int,
        inquiry: Inquiry,
        answers: Sequence[Seen],
    ) -> None:
        others = list(zip(names, answers, strict=True))
        if (
            parent.dir.notes == notes
            and self._table.get(parent.ino) is parent
            and parent.ino in self._tree
        ):
            others = self._first_sight.take(parent, names, answers)
        for name, seen in others:
            self._learn_asked(parent, name, notes, inquiry, seen)

    # -- forgetting

    def reap(self, node: Node) -> None:
        """Drop a node that neither kernel nor RAM tier nor log needs, and its parents, if they were
        kept for it.
        """
        todo = [node]
        while todo:
            following = todo.pop()
            if following.ino in self._table:  # a directory comes once for each name in it
                todo += self._reap(following)

    def _reap(self, node: Node) -> list[Node]:
        if not node.names and node.handles == 0 and not node.body.is_only_backing:
            self._contents.drop(
                node
            )  # deleted and closed: its bytes need not wait for the kernel to forget it
        if node.ino == ROOT or node.lookups or node.handles or not node.body.is_only_backing:
            return []
        if (
            self._log.is_pending(node.ino)
            or self._log.is_victim(node.ino)
            or (node.unlogged and node.names)
            or node.ino in self.beneath
        ):
            return []
        if node.is_dir and (
            self._log.pending_in(node.ino)
            or any(c.ino or c.pins for c in node.dir.children.values())
        ):
            return []
        self._contents.forget(node)
        parents = [parent for parent, _name in node.names]
        self._tree.forget(node.ino)
        self._table.drop(node)
        return [above for above in map(self._table.get, parents) if above is not None]

    def statistics(self) -> LowerViewStatistics:
        """What `status`, the metrics and the tests see."""
        return LowerViewStatistics(
            self.questions.stale, self.questions.overtaken_answers, self.whole.mismatches
        )
