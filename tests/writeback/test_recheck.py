"""A server that dies between a commit and its flush forgets what it did; a later flush that
succeeds must not make that "persisted".
"""

from __future__ import annotations

import errno
import itertools
import stat
from collections.abc import Callable

import pytest

from acpfs.backing import posix_acl
from acpfs.backing.lower import LowerPath
from tests.writeback.conftest import Run
from tests.writeback.memory_lower import Inode
from tests.writeback.world import World

clause = pytest.mark.clause
Forget = Callable[[], None]


class Server:
    """Dies at the first flush in a directory, and takes what it forgets with it; the next one is
    there at once.
    """

    def __init__(
        self, world: World, directory: LowerPath, forget: Forget, *, down_for: int = 0
    ) -> None:
        """`down_for`: so many looks at names fail then."""
        self._directory = directory
        self._forget = forget
        self.down_for = down_for
        self.died = False
        self.flushed: list[LowerPath] = []
        """By the next one."""
        world.lower.fault = self

    def __call__(self, label: str, path: LowerPath) -> None:
        if self.died and label == "lstat" and self.down_for:
            self.down_for -= 1
            raise OSError(errno.EIO, "the server is down")
        if label not in ("fsync directory", "fsync entry"):
            return
        if self.died:
            self.flushed.append(path)
        elif path[: len(self._directory)] == self._directory:
            self._forget()
            self.died = True
            raise OSError(errno.EIO, "the server died")


def _as_before(directory: Inode) -> Forget:
    """The directory's entries are those of now, and their modes."""
    before = {name: (inode, inode.mode) for name, inode in directory.children.items()}

    def forget() -> None:
        directory.children.clear()
        for name, (inode, mode) in before.items():
            directory.children[name] = inode
            inode.mode = mode

    return forget


@pytest.mark.parametrize("lost", [(b"d", b"f"), (b"d", b"final"), (b"new",)])
def test_what_a_failed_flush_lost_is_made_again(world: World, run: Run, lost: LowerPath) -> None:
    world.mkdir("d")
    world.store("d/f", b"first")
    world.store("d/tmp", b"t")
    run(world.drain)
    world.store("d/f", b"content")
    world.rename("d/tmp", "d/final")
    world.mkdir("new")
    done = False

    def forget(label: str, _path: LowerPath) -> None:
        nonlocal done
        if (
            label == "fsync directory"
            and not done
            and lost[-1] in world.lower._find(lost[:-1]).children
        ):
            done = True
            directory = world.lower._find(lost[:-1]).children
            inode = directory.pop(lost[-1])
            if lost[-1] == b"final":
                directory[b"tmp"] = inode  # as before the rename
            raise OSError(errno.EIO, "the server died")

    world.lower.fault = forget
    run(world.drain)
    assert done
    assert world.lower.visible() == world.application_view()


def _symlink(world: World) -> None:
    world.symlink(b"tmp", "d/latest")


def _fifo(world: World) -> None:
    world.mkfifo("d/fifo")


def _link(world: World) -> None:
    world.link("d/tmp", "d/again")


def _exchange(world: World) -> None:
    world.exchange("d/tmp", "d/f")


def _replace(world: World) -> None:
    world.rename("d/tmp", "d/f")


def _store_and_replace(world: World) -> None:
    world.store("d/new", b"new")
    world.rename("d/new", "d/f")


def _symlink_and_replace(world: World) -> None:
    world.symlink(b"f", "d/new")
    world.rename("d/new", "d/latest-1")


def _set_mode(world: World) -> None:
    world.setattr("d/tmp", permissions=0o600)


CHANGES = [
    _symlink,
    _fifo,
    _link,
    _exchange,
    _replace,
    _store_and_replace,
    _symlink_and_replace,
    _set_mode,
]


@clause("S6")
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_a_server_forgot_is_made_again(
    world: World, run: Run, change: Callable[[World], None]
) -> None:
    world.mkdir("d")
    world.store("d/f", b"first")
    world.store("d/tmp", b"t")
    world.symlink(b"tmp", "d/latest-1")
    run(world.drain)
    server = Server(world, (b"d",), _as_before(world.lower.inode("d")))
    change(world)
    run(world.drain)
    assert server.died
    assert world.lower.visible() == world.application_view()
    if change is _set_mode:
        assert stat.S_IMODE(world.lower.inode("d/tmp").mode) == 0o600


def _store(world: World) -> None:
    world.store("d/f", b"content")


def _mkdir(world: World) -> None:
    world.mkdir("d/s")
    world.store("d/s/f", b"2")


def _move(world: World) -> None:
    world.rename("d/tmp", "d/final")


@clause("S6")
@pytest.mark.parametrize("change", [*CHANGES, _store, _mkdir, _move])
def test_the_next_worker_makes_again_what_a_server_forgot(
    world: World, run: Run, change: Callable[[World], None]
) -> None:
    """The flush failed, and the worker was killed before it could look at what there still was."""
    world.mkdir("d")
    world.store("d/f", b"first")
    world.store("d/tmp", b"t")
    world.symlink(b"tmp", "d/latest-1")
    run(world.drain)
    server = Server(world, (b"d",), _as_before(world.lower.inode("d")), down_for=1_000_000)
    change(world)
    run(world.run_for, 5.0)
    assert server.died
    assert world.lower.visible() != world.application_view() or change is _set_mode
    world.restart()
    server.down_for = 0
    run(world.drain)
    assert world.lower.visible() == world.application_view()
    if change is _set_mode:
        assert stat.S_IMODE(world.lower.inode("d/tmp").mode) == 0o600
    if change is _mkdir:
        assert stat.S_IMODE(world.lower.inode("d/s").mode) == 0o755


@clause("S6")
def test_nothing_comes_over_what_a_server_forgot_to_move_before_the_next_worker_has_looked(
    world: World, run: Run
) -> None:
    """It lies under its former name, at which there is to be another file."""
    world.mkdir("d")
    world.store("d/f", b"first")
    run(world.drain)
    server = Server(world, (b"d",), _as_before(world.lower.inode("d")), down_for=1_000_000)
    world.rename("d/f", "d/moved")
    run(world.run_for, 5.0)
    assert server.died
    world.store("d/f", b"second")
    run(world.run_for, 5.0)  # staged, and behind the flush that fails
    world.restart()
    server.down_for = 0
    run(world.drain)
    assert world.lower.visible() == world.application_view()


@clause("S6")
def test_no_older_attributes_are_given_while_it_is_looked_what_there_is(
    world: World, run: Run
) -> None:
    """A worker that is killed between two operations of a group has left what the later one
    says.
    """
    world.mkdir("d")
    run(world.drain)
    server = Server(world, (b"d",), lambda: None)
    seen: list[int] = []
    tried = False

    def look(label: str, path: LowerPath) -> None:
        nonlocal tried
        if (label, path) == ("mkdir", (b"d", b"s")) and not tried:
            tried = True
            assert world.setattr("d/s", permissions=0o711) is not None  # of its own
            raise OSError(errno.EIO, "not yet")
        if server.died and (b"s" in world.lower.inode("d").children):
            seen.append(stat.S_IMODE(world.lower.inode("d/s").mode))
        server(label, path)

    world.lower.fault = look
    world.mkdir("d/s")
    run(world.drain)
    assert server.died
    assert set(seen) == {0o711}


@clause("S6")
def test_a_content_keeps_its_attributes_where_older_ones_are_given_again(
    world: World, run: Run
) -> None:
    world.mkdir("d")
    world.store("d/f", b"1")
    run(world.drain)
    server = Server(world, (b"d",), lambda: None)
    tries = 0

    def refuse(label: str, path: LowerPath) -> None:
        nonlocal tries
        if (label, path) == ("mkdir", (b"first",)) and tries < 3:
            tries += 1  # all of it is staged by then, and one group
            raise OSError(errno.EIO, "not yet")
        server(label, path)

    world.lower.fault = refuse
    world.mkdir("first")
    world.setattr("d/f", permissions=0o600, xattrs={b"user.a": b"older"})
    world.store("d/f", b"2", mode=0o640, mtime_ns=10**18, xattrs={b"user.a": b"newer"})
    run(world.drain)
    assert server.died
    stored = world.lower.inode("d/f")
    assert stat.S_IMODE(stored.mode) == 0o640
    assert (stored.xattrs[b"user.a"], stored.mtime_ns) == (b"newer", 10**18)


@clause("S6")
@pytest.mark.parametrize("value", [b"newer", None])
def test_what_came_with_a_content_comes_with_the_next_one_where_both_are_lost(
    world: World, run: Run, value: bytes | None
) -> None:
    world.mkdir("d")
    world.store("d/f", b"1", xattrs={b"user.a": b"older"})
    run(world.drain)
    server = Server(world, (b"d",), _as_before(world.lower.inode("d")))
    tries = 0

    def refuse(label: str, path: LowerPath) -> None:
        nonlocal tries
        if (label, path) == ("mkdir", (b"first",)) and tries < 3:
            tries += 1  # all of it is staged by then, and one group
            raise OSError(errno.EIO, "not yet")
        server(label, path)

    world.lower.fault = refuse
    world.mkdir("first")
    world.store("d/f", b"2", xattrs={b"user.a": value})
    world.link("d/f", "d/second")  # so the content is not left out
    world.store("d/f", b"3")
    run(world.drain)
    assert server.died
    assert world.lower.visible() == world.application_view()
    assert world.lower.inode("d/f").xattrs.get(b"user.a") == value


@clause("S6")
def test_a_lost_content_gets_nothing_of_another_file_that_is_there_again(
    world: World, run: Run
) -> None:
    """Found by simulation: it was stored again, with extended attributes of what it replaces."""
    world.mkdir("d")
    world.store("d/f", b"1", xattrs={b"user.a": b"another's"})
    run(world.drain)
    server = Server(world, (b"d",), _as_before(world.lower.inode("d")))
    world.store("d/new", b"2")
    world.rename("d/new", "d/f")
    run(world.drain)
    assert server.died
    assert world.lower.visible() == world.application_view()
    assert b"user.a" not in world.lower.inode("d/f").xattrs


@clause("S6", "S452")
@pytest.mark.parametrize("refusals", [0, 1])
def test_what_is_made_again_inherits_no_acl_that_came_later(
    world: World, run: Run, monkeypatch: pytest.MonkeyPatch, refusals: int
) -> None:
    """`refusals`: of its attributes, once it is there again."""
    make = world.lower.mkdir
    left = refusals

    def inherits(path: LowerPath) -> None:
        make(path)
        default = world.lower._find(path[:-1]).xattrs.get(posix_acl.DEFAULT)
        if default is not None:
            world.lower._find(path).xattrs[posix_acl.DEFAULT] = default

    def refuse(label: str, path: LowerPath) -> None:
        nonlocal left
        if server.died and left and (label, path) == ("setattr", (b"d", b"s")):
            left -= 1
            raise OSError(errno.EIO, "not yet")
        server(label, path)

    world.mkdir("d")
    run(world.drain)
    monkeypatch.setattr(world.lower, "mkdir", inherits)
    server = Server(world, (b"d",), _as_before(world.lower.inode("d")))
    world.lower.fault = refuse
    world.mkdir("d/s")
    world.setattr("d", xattrs={posix_acl.DEFAULT: b"later"})
    run(world.drain)
    assert server.died
    assert left == 0
    assert world.lower.inode("d").xattrs[posix_acl.DEFAULT] == b"later"
    assert posix_acl.DEFAULT not in world.lower.inode("d/s").xattrs


@clause("S6")
def test_a_directory_that_was_moved_with_what_was_done_in_it(world: World, run: Run) -> None:
    world.mkdir("d")
    world.store("d/x", b"1")
    run(world.drain)
    inner = _as_before(world.lower.inode("d"))
    outer = _as_before(world.lower.root)
    world.rename("d", "e")
    world.rename("e/x", "e/y")
    world.mkdir("e/s")
    world.store("e/s/f", b"2")

    def forget() -> None:
        outer()
        inner()

    server = Server(world, (), forget)
    run(world.drain)
    assert server.died
    assert world.lower.visible() == world.application_view()


@clause("S6")
def test_what_was_moved_and_came_back_is_not_moved_once_more(world: World, run: Run) -> None:
    """A file was moved away and another made in its place, and they changed places: after a flush
    that failed, the first of it was done once more, over the other file.
    """
    world.mkdir("d")
    world.store("d/a", b"first")
    run(world.drain)
    wanted = {b"d/": b"", b"d/a": b"first", b"d/b": b"second"}
    states: list[int] = []
    failed: list[str] = []

    def fail(label: str, _path: LowerPath) -> None:
        if label == "rename" and not failed:  # so long that all are of one group
            failed.append(label)
            raise OSError(errno.EIO, "not done")
        if label == "fsync directory" and not states and world.lower.visible() == wanted:
            states.append(len(world.lower.visible_history))
            raise OSError(errno.EIO, "not done")

    world.lower.fault = fail
    world.rename("d/a", "d/b")
    world.store("d/a", b"second")
    world.exchange("d/a", "d/b")
    run(world.drain)
    assert world.application_view() == wanted
    assert [state for state in world.lower.visible_history[states[0] :] if state != wanted] == []


@clause("S6")
def test_attributes_that_followed_a_lost_content_come_with_it(world: World, run: Run) -> None:
    """They were given to a file that is not there any more, by an operation of their own in the
    same group.
    """
    world.mkdir("d")
    run(world.drain)
    server = Server(world, (b"d",), _as_before(world.lower.inode("d")))
    tries = 0

    def refuse(label: str, path: LowerPath) -> None:
        nonlocal tries
        if (label, path) == ("mkdir", (b"first",)) and tries < 3:
            tries += 1
            if tries == 3:
                assert world.setattr("d/f", permissions=0o600) is not None  # it is staged
            raise OSError(errno.EIO, "not yet")
        server(label, path)

    world.lower.fault = refuse
    world.mkdir("first")
    world.store("d/f", b"1")
    run(world.drain)
    assert server.died
    assert world.lower.visible() == world.application_view()
    assert stat.S_IMODE(world.lower.inode("d/f").mode) == 0o600


@clause("S6")
def test_a_server_that_is_still_down_when_it_is_asked(world: World, run: Run) -> None:
    """The flush after that succeeds, and says nothing of what the last server forgot."""
    world.mkdir("d")
    run(world.drain)
    server = Server(world, (b"d",), _as_before(world.lower.inode("d")), down_for=3)
    world.store("d/f", b"1")
    run(world.drain)
    assert server.died
    assert world.lower.visible() == world.application_view()


@clause("S6")
def test_what_is_made_again_is_flushed_where_a_flush_succeeded_before(
    world: World, run: Run
) -> None:
    """It came after the server's death, and flushed nothing of what that took."""
    world.mkdir("d")
    world.mkdir("e")
    run(world.drain)
    forget_d, forget_e = (_as_before(world.lower.inode(name)) for name in "de")

    def forget() -> None:
        forget_d()
        forget_e()

    server = Server(world, (b"d",), forget)
    world.symlink(b"1", "d/link")
    world.symlink(b"2", "e/link")
    run(world.drain)
    assert world.lower.visible() == world.application_view()
    assert server.flushed.count((b"e",)) == 2


@clause("S6")
def test_what_others_have_taken_holds_nothing_up(world: World, run: Run) -> None:
    """Where a symlink was, somebody has made a directory by then: it cannot be made again, and all
    else goes on.
    """
    world.mkdir("d")
    run(world.drain)
    before = _as_before(world.lower.inode("d"))

    def forget() -> None:
        before()
        world.lower._place((b"d", b"link"), world.lower._inode(stat.S_IFDIR | 0o755))

    server = Server(world, (b"d",), forget)
    world.symlink(b"1", "d/link")
    world.store("f", b"1")
    run(world.drain)
    assert server.died
    assert world.lower.visible() == {b"d/": b"", b"d/link/": b"", b"f": b"1"}


@clause("S23")
def test_a_directory_that_is_not_found_but_listed_is_flushed(world: World, run: Run) -> None:
    world.mkdir("d")
    run(world.drain)
    asked = 0

    def deny(label: str, path: LowerPath) -> None:
        nonlocal asked
        asked += (label, path) == ("fsync directory", (b"d",))
        if (label, path) == ("fsync directory", (b"d",)) and asked <= 3:
            raise OSError(errno.ENOENT, "not found")

    world.lower.fault = deny
    world.store("d/f", b"1")
    run(world.drain)
    assert asked == 4


@clause("S6")
def test_what_a_failed_change_has_put_there_is_not_replaced_by_what_was_before(
    world: World, run: Run
) -> None:
    """The first content is looked for after a flush that failed; the second lies there by a rename
    that was called failed.
    """
    world.mkdir("d")
    run(world.drain)
    renames = 0
    failed: set[str] = set()

    def fault(label: str, path: LowerPath) -> None:
        nonlocal renames
        if label == "rename" and path == (b"d", b"f"):
            renames += 1
            if renames == 1:
                world.store("d/f", b"second")  # behind one that was begun
                raise OSError(errno.EIO, "not done")
            if renames == 3:
                (name,) = (one for one in world.lower.list_staging() if one)
                staging = world.lower._find(world.lower.staging_path("")[:-1]).children
                world.lower._find((b"d",)).children[b"f"] = staging.pop(name.encode())
                world.lower._changed()
                raise OSError(errno.EIO, "done")
        if label == "fsync directory" and renames == 3 and "flush" not in failed:
            failed.add("flush")
            raise OSError(errno.EIO, "the server died")

    world.lower.fault = fault
    world.store("d/f", b"first")
    run(world.drain)
    assert failed
    shown = [state.get(b"d/f") for state in world.lower.visible_history]
    assert b"first" not in shown[shown.index(b"second") :]
    assert world.lower.visible() == world.application_view()


def staged(world: World) -> Inode:
    """The one staging file, taken out of its directory."""
    (name,) = (one for one in world.lower.list_staging() if one)
    directory = world.lower._find(world.lower.staging_path("")[:-1])
    inode: Inode = directory.children.pop(name.encode())
    return inode


class LaterContent:
    """A content comes to its name as a test says, answered EIO; then the first flush there fails.

    What comes before it fails once: so long that the content is staged, and both are of one group.
    """

    def __init__(
        self, world: World, at: LowerPath, put: Callable[[Inode], None], *, renames: int = 1
    ) -> None:
        """`renames`: which of those to that name it is."""
        self._world = world
        self._at = at
        self._put = put
        self._left = renames
        self.failed: list[str] = []
        world.lower.fault = self

    def __call__(self, label: str, path: LowerPath) -> None:
        if label in ("symlink", "mknod", "link", "rename") and not self.failed:
            self.failed.append("first")
            raise OSError(errno.EIO, "not done")
        if label == "rename" and path == self._at:
            self._left -= 1
            if self._left == 0:
                self._put(staged(self._world))
                self._world.lower._changed()
                self.failed.append("rename")
                raise OSError(errno.EIO, "done")
        if label == "fsync directory" and self.failed == ["first", "rename"]:
            self.failed.append("flush")
            raise OSError(errno.EIO, "the server died")

    def shown(self, path: bytes) -> list[bytes | None]:
        """What the storage has shown there from the later content on."""
        assert self.failed == ["first", "rename", "flush"]
        shown = [state.get(path) for state in self._world.lower.visible_history]
        return shown[shown.index(b"second") :]


@clause("S6")
@pytest.mark.parametrize("as_link", [False, True])
def test_no_special_file_is_put_over_what_a_failed_change_has_put_there(
    world: World, run: Run, as_link: bool
) -> None:
    """A file was closed under the name of a link or fifo, which it replaces in one rename."""
    world.mkdir("d")
    run(world.drain)
    special = world.symlink(b"old", "d/f") if as_link else world.mkfifo("d/f")
    world._gone("d/f")
    file = world.store("d/f", b"second")
    with world.lock:
        world.log.set_victim(file, special.ino)
        world.state.commit()
    children = world.lower._find((b"d",)).children
    later = LaterContent(world, (b"d", b"f"), lambda inode: children.update({b"f": inode}))
    run(world.drain)
    assert set(later.shown(b"d/f")) == {b"second"}
    assert world.lower.visible() == world.application_view()


@clause("S6")
def test_no_further_name_leads_to_older_content_than_a_failed_change_has_put_there(
    world: World, run: Run
) -> None:
    world.mkdir("d")
    world.store("d/f", b"first")
    run(world.drain)
    world.link("d/f", "d/g")
    world.store("d/f", b"second")
    children = world.lower._find((b"d",)).children
    later = LaterContent(world, (b"d", b"f"), lambda inode: children.update({b"g": inode}))
    run(world.drain)
    assert set(later.shown(b"d/g")) == {b"second"}
    assert world.lower.visible() == world.application_view()


@clause("S6")
def test_nothing_is_moved_over_what_a_failed_change_has_put_there(world: World, run: Run) -> None:
    """The server has lost the rename, and kept what came to the new name after it."""
    world.mkdir("d")
    world.store("d/a", b"first")
    run(world.drain)
    world.rename("d/a", "d/f")
    world.store("d/f", b"second")
    children = world.lower._find((b"d",)).children
    first = children[b"a"]

    def put(content: Inode) -> None:
        children.update({b"f": content, b"a": first})

    later = LaterContent(world, (b"d", b"f"), put, renames=2)
    run(world.drain)
    assert set(later.shown(b"d/f")) == {b"second"}
    assert world.lower.visible() == world.application_view()


@clause("S6", "S450")
def test_what_a_failed_change_has_put_there_gets_no_attributes_of_before(
    world: World, run: Run
) -> None:
    world.mkdir("d")
    world.store("d/f", b"first")
    run(world.drain)
    world.mkfifo("d/other")
    world.setattr("d/f", permissions=0o666, mtime_ns=10**17)
    world.store("d/f", b"second", mode=0o600, mtime_ns=10**18)
    children = world.lower._find((b"d",)).children
    later = LaterContent(world, (b"d", b"f"), lambda inode: children.update({b"f": inode}))
    fault = world.lower.fault
    assert fault is not None
    modes: set[int] = set()

    def look(label: str, path: LowerPath) -> None:
        if "rename" in later.failed:
            modes.add(stat.S_IMODE(children[b"f"].mode))
        fault(label, path)

    world.lower.fault = look
    run(world.drain)
    assert set(later.shown(b"d/f")) == {b"second"}
    assert modes == {0o600}
    assert children[b"f"].mtime_ns == 10**18


@clause("S6")
def test_a_directory_that_a_failed_change_has_removed_is_not_made_again(
    world: World, run: Run
) -> None:
    """It was made and removed in one group, the removal was called failed, and so was the flush."""
    path = (b"d", b"x")
    world.mkdir("d")
    run(world.drain)
    failed: list[str] = []

    def fault(label: str, at: LowerPath) -> None:
        if label == "mkdir" and not failed:
            failed.append(label)
            world.rmdir("d/x")  # behind one that was begun
            raise OSError(errno.EIO, "not done")
        if label == "rmdir" and failed == ["mkdir"]:
            failed.append(label)
            world.lower._remove(path)
            raise OSError(errno.EIO, "done")
        if label == "fsync directory" and failed == ["mkdir", "rmdir"]:
            failed.append(label)
            raise OSError(errno.EIO, "the server died")

    world.lower.fault = fault
    world.mkdir("d/x")
    run(world.drain)
    assert failed == ["mkdir", "rmdir", "fsync directory"]
    shown = [b"d/x" in {name.rstrip(b"/") for name in one} for one in world.lower.visible_history]
    assert [is_there for is_there, _times in itertools.groupby(shown)] == [False, True, False]
    assert world.lower.visible() == world.application_view()
