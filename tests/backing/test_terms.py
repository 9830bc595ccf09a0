"""NodeTerms: one owner each, and the fence around earlier ones, on real file systems."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from acpfs.backing import leftovers
from acpfs.backing.directory import BackingDirectory
from acpfs.backing.leftovers import MachineId
from acpfs.backing.syscalls import Opener
from acpfs.backing.terms import (
    NodeTerms,
    SupersededError,
    TermClaim,
    name_in_term,
    newest_claim,
    node_and_term,
)
from acpfs.errors import RefusedError
from acpfs.writeback.evidence import absence
from tests.rig.runtime import REAL

NODE = "a.1"
OTHER = "n7"
DONE = "done"
clause = pytest.mark.clause
FILE_SYSTEMS = {
    "tmpfs": (),
    "ext4": ("mkfs.ext4", "-q", "-F"),
    "xfs": ("mkfs.xfs", "-q"),
    "btrfs": ("mkfs.btrfs", "-q"),
}


@pytest.fixture(params=FILE_SYSTEMS)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of that kind."""
    at = tmp_path / "storage"
    at.mkdir()
    maker = FILE_SYSTEMS[request.param]
    if not maker:
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", at], check=True)
    else:
        if shutil.which(maker[0]) is None:
            pytest.skip(f"no {maker[0]}")
        image = tmp_path / "image"
        with open(image, "wb") as file:
            file.truncate(320 << 20)
        subprocess.run([*maker, image], check=True)
        subprocess.run(["mount", "-o", "loop", image, at], check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", at], check=True)


def answer(call: Callable[[], object]) -> str:
    try:
        call()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return DONE


def adopter(backing: Path, by: str = OTHER) -> NodeTerms:
    return NodeTerms(Opener(os.open(backing, os.O_RDONLY | os.O_DIRECTORY)), NODE, REAL, by)


def stage(directory: BackingDirectory, name: str, content: bytes = b"new") -> None:
    fd = directory.create_staging(name)
    os.write(fd, content)
    os.fsync(fd)
    directory.close(fd)


def staged(backing: Path) -> dict[str, bytes]:
    """Name → content, in all staging directories."""
    return {
        path.name: path.read_bytes()
        for path in backing.glob(".acpfs/staging/*/*")
        if path.is_file()
    }


class Late:
    """Calls whose directories were found before the fence."""

    def __init__(self, top: Path, staging: Path) -> None:
        (top / "target").write_bytes(b"old")
        (top / "other").write_bytes(b"other")
        self.top = os.open(top, os.O_PATH | os.O_DIRECTORY)
        self.staging = os.open(staging, os.O_PATH | os.O_DIRECTORY)

    def answers(self) -> dict[str, str]:
        def store() -> None:
            os.rename("x", "target", src_dir_fd=self.staging, dst_dir_fd=self.top)

        def remove() -> None:
            os.rename("other", "gone", src_dir_fd=self.top, dst_dir_fd=self.staging)

        def create() -> None:
            os.close(os.open("y", os.O_CREAT | os.O_WRONLY, dir_fd=self.staging))

        calls = {"store": store, "remove": remove, "create": create}
        try:
            return {name: answer(call) for name, call in calls.items()}
        finally:
            os.close(self.top)
            os.close(self.staging)


REFUSED = {"store": "ENOENT", "remove": "ENOENT", "create": "ENOENT"}


@pytest.mark.mount
@clause("S553")
def test_late_calls_of_an_earlier_term_fail(storage: Path) -> None:
    directory = BackingDirectory(storage, NODE, REAL)
    stage(directory, "x")
    late = Late(storage, storage / ".acpfs/staging" / NODE)
    assert adopter(storage).take() == 1
    assert late.answers() == REFUSED
    assert (storage / "target").read_bytes() == b"old"
    assert staged(storage) == {"x": b"new"}
    late = Late(storage, storage / f".acpfs/staging/{NODE}+1")
    assert adopter(storage, "n8").take() == 2
    assert late.answers() == REFUSED
    assert newest_claim(directory._entries.opener, NODE.encode()) == TermClaim(
        2,
        "n8",
        newest_claim(directory._entries.opener, NODE.encode()).at,  # type: ignore[union-attr]
    )
    directory.disconnect()


@pytest.mark.mount
@clause("S553")
def test_a_fence_that_renames_would_let_them_through(storage: Path) -> None:
    """So what is tested above is not that nothing works."""
    directory = BackingDirectory(storage, NODE, REAL)
    stage(directory, "x")
    of = storage / ".acpfs/staging"
    late = Late(storage, of / NODE)
    os.rename(of / NODE, of / f"{NODE}+1")
    assert late.answers() == dict.fromkeys(REFUSED, DONE)
    directory.disconnect()


@pytest.mark.mount
@clause("S553")
def test_late_calls_in_an_area_fail_too(tmp_path: Path) -> None:
    at = tmp_path / "below"
    at.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", at], check=True)
    try:
        directory = BackingDirectory(tmp_path, NODE, REAL)
        name = directory.stage_near("x", (b"below",))
        stage(directory, name)
        late = Late(at, at / ".acpfs/staging" / NODE)
        assert adopter(tmp_path).take() == 1
        assert late.answers() == REFUSED
        assert staged(at) == {"x": b"new"}
        with pytest.raises(SupersededError, match="n7 has taken over"):
            directory.create_staging(name)
        with pytest.raises(SupersededError):
            directory.rename(directory.staging_path(name), (b"below", b"target"))
        directory.disconnect()
    finally:
        subprocess.run(["umount", "-l", at], check=True)


# -- who has been superseded


@clause("S553")
def test_who_is_superseded_begins_nothing_and_makes_no_directory(tmp_path: Path) -> None:
    directory = BackingDirectory(tmp_path, NODE, REAL)
    stage(directory, "x")
    adopter(tmp_path).take()
    before = sorted(tmp_path.glob(".acpfs/staging/*"))
    calls: tuple[Callable[[], object], ...] = (
        lambda: directory.create_staging("z"),
        lambda: directory.open_staging("x"),
        lambda: directory.rename(directory.staging_path("x"), (b"f",)),
        lambda: directory.lstat(directory.staging_path("x")),
        lambda: directory.remove_staging("x"),
    )
    for call in calls:
        with pytest.raises(SupersededError, match=r"n7 has taken over the log of node a\.1"):
            call()
    directory.write_own((b"manifest", b"m"), b"")  # what is no staging goes on
    assert sorted(tmp_path.glob(".acpfs/staging/*")) == before
    assert staged(tmp_path) == {"x": b"new"}
    directory.disconnect()


@clause("S553")
def test_a_file_that_a_fence_has_just_moved_is_not_missing(tmp_path: Path) -> None:
    """The directory is still there: the fence has not come so far."""
    directory = BackingDirectory(tmp_path, NODE, REAL)
    stage(directory, "x")
    terms = adopter(tmp_path)
    assert terms._claim(1)
    os.rename(tmp_path / ".acpfs/staging" / NODE / "x", tmp_path / "moved")
    path = directory.staging_path("x")
    calls: tuple[Callable[[], object], ...] = (
        lambda: absence.make_sure(directory, path),
        lambda: directory.rename(path, (b"f",)),
        lambda: directory.open_staging("x"),
    )
    for call in calls:
        directory._entries.terms._superseded = None
        with pytest.raises(SupersededError):
            call()
    directory.disconnect()


@clause("S553")
def test_a_look_after_a_rename_asks_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made for each stored file, and each question is a round trip."""
    directory = BackingDirectory(tmp_path, NODE, REAL)
    stage(directory, "x")
    path = directory.staging_path("x")
    directory.rename(path, (b"f",))
    asked: list[object] = []
    opener = directory._entries.opener
    monkeypatch.setattr(opener, "open", lambda *words: asked.append(words))
    with pytest.raises(FileNotFoundError):
        directory.lstat(path)
    assert asked == []
    monkeypatch.undo()
    absence.make_sure(directory, path)
    directory.disconnect()


@clause("S553")
def test_what_comes_late_into_a_directory_that_is_removed_is_moved_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = BackingDirectory(tmp_path, NODE, REAL)
    stage(directory, "x")
    rmdir = os.rmdir

    def late(*words: Any, **named: Any) -> None:
        monkeypatch.setattr(os, "rmdir", rmdir)
        for name in ("x", "y"):
            (tmp_path / ".acpfs/staging" / NODE / name).write_bytes(b"late")
        rmdir(*words, **named)

    monkeypatch.setattr(os, "rmdir", late)
    adopter(tmp_path).take()
    found = staged(tmp_path)
    assert sorted(found.values()) == [b"late", b"late", b"new"]
    assert (found["x"], found["y"]) == (b"new", b"late")
    assert not (tmp_path / ".acpfs/staging" / NODE).is_dir()
    directory.disconnect()


@clause("S553")
def test_a_mount_under_a_node_id_whose_log_is_taken_over_is_refused(tmp_path: Path) -> None:
    BackingDirectory(tmp_path, NODE, REAL).disconnect()
    adopter(tmp_path).take()
    before = sorted(tmp_path.glob(".acpfs/staging/*"))
    with pytest.raises(RefusedError, match="n7 has taken over"):
        BackingDirectory(tmp_path, NODE, REAL)
    assert sorted(tmp_path.glob(".acpfs/staging/*")) == before
    BackingDirectory(tmp_path, "a", REAL).disconnect()  # another node, whatever it is called


# -- a directory that a person removed


@pytest.mark.parametrize("what", [".acpfs", ".acpfs/staging", f".acpfs/staging/{NODE}"])
@clause("S554")
def test_where_a_person_removed_it_the_next_term_begins(tmp_path: Path, what: str) -> None:
    directory = BackingDirectory(tmp_path, NODE, REAL)
    stage(directory, "x")
    inode = (tmp_path / ".acpfs/staging" / NODE).stat().st_ino
    shutil.rmtree(tmp_path / what)
    with pytest.raises(FileNotFoundError):
        directory.lstat(directory.staging_path("x"))
    stage(directory, "y")
    directory.rename(directory.staging_path("y"), (b"f",))
    assert (tmp_path / "f").read_bytes() == b"new"
    (made,) = (p for p in (tmp_path / ".acpfs/staging").iterdir() if p.is_dir())
    assert made.name == f"{NODE}+1"
    assert made.stat().st_ino != inode or what == ".acpfs"
    claim = newest_claim(directory._entries.opener, NODE.encode())
    assert claim is not None
    assert (claim.term, claim.by) == (1, NODE)
    directory.disconnect()
    again = BackingDirectory(tmp_path, NODE, REAL)  # and it goes on in that term
    stage(again, "z")
    assert [path.parent.name for path in tmp_path.glob(".acpfs/staging/*/z")] == [f"{NODE}+1"]
    again.disconnect()


@clause("S554")
def test_what_is_still_there_comes_with_the_term(tmp_path: Path) -> None:
    """A storage may say for a moment that a directory is gone."""
    directory = BackingDirectory(tmp_path, NODE, REAL)
    stage(directory, "x")
    directory._entries.terms.lost(NODE.encode())
    assert os.read(directory.open_staging("x"), 9) == b"new"
    assert directory.list_staging() == ["x"]
    assert staged(tmp_path) == {"x": b"new"}
    directory._entries.terms.lost(NODE.encode())  # late: that was the last one
    directory._entries.terms.lost(f"{NODE}+1".encode())
    assert [path.parent.name for path in tmp_path.glob(".acpfs/staging/*/x")] == [f"{NODE}+2"]
    assert [path.name for path in tmp_path.glob(".acpfs/claims/*")] == [f"{NODE}+2"]
    directory.disconnect()


@clause("S554")
def test_threads_that_find_it_gone_together_begin_one_term(tmp_path: Path) -> None:
    directory = BackingDirectory(tmp_path, NODE, REAL)
    stage(directory, "x")
    shutil.rmtree(tmp_path / ".acpfs")
    threads = [
        threading.Thread(target=stage, args=(directory, f"s{number}")) for number in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(staged(tmp_path)) == 12
    assert [path.name for path in tmp_path.glob(".acpfs/claims/*")] == [f"{NODE}+1"]
    directory.disconnect()


@clause("S554")
def test_an_older_acpfs_cannot_make_the_first_directory_again(tmp_path: Path) -> None:
    """What it did, at a mount and when it found no directory: mkdir, then open it as one."""
    directory = BackingDirectory(tmp_path, NODE, REAL)
    directory._entries.terms.lost(NODE.encode())
    bar = tmp_path / ".acpfs/staging" / NODE
    assert answer(bar.mkdir) == "EEXIST"
    assert answer(lambda: os.open(bar, os.O_RDONLY | os.O_DIRECTORY)) == "ENOTDIR"
    directory.disconnect()


# -- claims


def claimed(backing: Path) -> TermClaim | None:
    terms = adopter(backing)
    try:
        return newest_claim(terms._opener, NODE.encode())
    finally:
        os.close(terms._opener.root_fd)


def repeated(link: Callable[..., None]) -> Callable[..., None]:
    """A client of NFS sends the call again, as it has not heard of the first answer."""

    def call(*words: Any, **named: Any) -> None:
        link(*words, **named)
        link(*words, **named)

    return call


def no_links(_link: Callable[..., None]) -> Callable[..., None]:
    def call(*_words: Any, **_named: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    return call


def answer_lost(link: Callable[..., None]) -> Callable[..., None]:
    def call(*words: Any, **named: Any) -> None:
        link(*words, **named)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    return call


@pytest.mark.parametrize("how", [repeated, no_links, answer_lost])
@clause("S553")
def test_a_claim_is_ours_by_what_lies_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Any
) -> None:
    BackingDirectory(tmp_path, NODE, REAL).disconnect()
    monkeypatch.setattr(os, "link", how(os.link))
    assert adopter(tmp_path).take() == 1
    found = claimed(tmp_path)
    assert found is not None
    assert (found.term, found.by) == (1, OTHER)
    assert [path.name for path in (tmp_path / ".acpfs/claims").iterdir()] == [f"{NODE}+1"]


@clause("S553")
def test_of_two_that_claim_one_term_one_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    BackingDirectory(tmp_path, NODE, REAL).disconnect()
    link = os.link

    def late(*words: Any, **named: Any) -> None:
        monkeypatch.setattr(os, "link", link)
        assert adopter(tmp_path, "n8").take() == 1
        link(*words, **named)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(BlockingIOError):
        adopter(tmp_path).take()
    found = claimed(tmp_path)
    assert found is not None
    assert found.by == "n8"
    assert sorted(p.name for p in tmp_path.glob(".acpfs/staging/*")) == [NODE, f"{NODE}+1"]


@clause("S553")
def test_a_claim_that_is_made_when_a_newer_one_is_there_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer ones have removed the file whose name it takes."""
    BackingDirectory(tmp_path, NODE, REAL).disconnect()
    link = os.link

    def late(*words: Any, **named: Any) -> None:
        monkeypatch.setattr(os, "link", link)
        assert adopter(tmp_path, "n8").take() == 1
        assert adopter(tmp_path, "n9").take() == 2
        link(*words, **named)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(BlockingIOError):
        adopter(tmp_path).take()
    found = claimed(tmp_path)
    assert found is not None
    assert (found.term, found.by) == (2, "n9")


@pytest.mark.parametrize("call", ["mkdir", "listdir"])
@clause("S553")
def test_who_stands_still_while_a_newer_claim_fences_owns_nothing_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Before its directory is made, which that fence then does not find; and before it moves files
    there, when that fence has removed it.
    """
    directory = BackingDirectory(tmp_path, NODE, REAL)
    stage(directory, "x")
    real = getattr(os, call)

    def late(what: Any, *words: Any, **named: Any) -> Any:
        found = real(what, *words, **named) if call == "listdir" else None
        if what == f"{NODE}+1".encode() or found == ["x"]:
            monkeypatch.undo()
            assert adopter(tmp_path, "n8").take() == 2
        return real(what, *words, **named) if found is None else found

    monkeypatch.setattr(os, call, late)
    with pytest.raises(BlockingIOError):
        adopter(tmp_path).take()
    assert staged(tmp_path) == {"x": b"new"}
    assert (tmp_path / f".acpfs/staging/{NODE}+2/x").exists()
    left = {p.name for p in (tmp_path / ".acpfs/staging").iterdir() if p.is_dir()}
    assert left == {f"{NODE}+2"} | ({f"{NODE}+1"} if call == "mkdir" else set())
    assert adopter(tmp_path, "n9").take() == 3
    left = {p.name for p in (tmp_path / ".acpfs/staging").iterdir() if p.is_dir()}
    assert left == {f"{NODE}+3"}
    directory.disconnect()


@clause("S553")
def test_a_claim_that_is_not_whole_is_nobodys(tmp_path: Path) -> None:
    """Where there are no links it may be half-written, by somebody who died or is slow."""
    BackingDirectory(tmp_path, NODE, REAL).disconnect()
    (tmp_path / ".acpfs/claims").mkdir()
    (tmp_path / f".acpfs/claims/{NODE}+1").write_bytes(b'{"by": "n')
    directory = BackingDirectory(tmp_path, NODE, REAL)
    stage(directory, "x")
    found = claimed(tmp_path)
    assert found is not None
    assert (found.term, found.by) == (2, NODE)
    directory.disconnect()


def test_names_of_terms() -> None:
    assert node_and_term(b"a.1") == (b"a.1", 0)
    assert node_and_term(b"a.1+12") == (b"a.1", 12)
    for strange in (b"a+", b"a+0", b"a+01", b"a+x", b"+1"):
        assert node_and_term(strange)[1] == 0


# -- killed at every line

CALLS = ("link", "mkdir", "rename", "rmdir", "unlink", "fsync", "open")


def dies_at(number: int, work: Callable[[], object]) -> bool:
    """Whether the child that does it was killed before its call with that number."""
    pid = os.fork()
    if pid == 0:
        left = [number]

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def counts(*words: Any, **named: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*words, **named)

            return counts

        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        try:
            work()
        finally:
            os._exit(0)
    _pid, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@clause("S554")
def test_who_is_killed_at_any_line_goes_on_at_the_next_mount_and_loses_nothing(
    tmp_path: Path,
) -> None:
    """And twice: the mount that goes on is killed as well, at the same line of its own."""

    def begin(backing: Path) -> None:
        directory = BackingDirectory(backing, NODE, REAL)
        directory._entries.terms.lost(directory._entries.terms.name())

    number = 0
    is_killed = True
    while is_killed:
        backing = tmp_path / str(number)
        backing.mkdir()
        first = BackingDirectory(backing, NODE, REAL)
        for name in ("x", "y"):
            stage(first, name)
        late = Late(backing, backing / ".acpfs/staging" / NODE)
        is_killed = dies_at(number, lambda: begin(backing))  # noqa: B023
        is_killed = dies_at(number, lambda: begin(backing)) and is_killed  # noqa: B023
        again = BackingDirectory(backing, NODE, REAL)
        assert sorted(again.list_staging()) == ["x", "y"]
        for name in ("x", "y"):
            again.rename(again.staging_path(name), (name.encode(),))
            assert (backing / name).read_bytes() == b"new"
        if newest_claim(again._entries.opener, NODE.encode()) is not None:
            assert late.answers() == REFUSED
        directories = [p for p in (backing / ".acpfs/staging").iterdir() if p.is_dir()]
        assert len(directories) == 1
        again.disconnect()
        first.disconnect()
        number += 1
    assert number > 20


# -- two at once


class Turns:
    """Lets one of some threads make its next call, as chance says."""

    def __init__(self, seed: int, count: int) -> None:
        self._chance = random.Random(seed)
        self._changed = threading.Condition()
        self._waiting: set[int] = set()
        self._running = count
        self._turn = -1
        self._last = -1
        """Goes on, mostly: so others stand still in the middle of something for long."""
        self.here = threading.local()

    def wait(self) -> None:
        me = getattr(self.here, "number", None)
        if me is None:
            return
        with self._changed:
            self._waiting.add(me)
            self._choose()
            self._changed.wait_for(lambda: self._turn == me)
            self._waiting.discard(me)
            self._turn = -1

    def gated(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def waits(*words: Any, **named: Any) -> Any:
            self.wait()
            return call(*words, **named)

        return waits

    def _choose(self) -> None:
        if self._turn < 0 and len(self._waiting) == self._running:
            waiting = sorted(self._waiting)
            if self._last not in waiting or self._chance.random() < 0.1:
                self._last = self._chance.choice(waiting)
            self._turn = self._last
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._running -= 1
            if self._waiting:
                self._choose()


class Race:
    """Some that claim, and the first owner; each puts files into place as long as it can."""

    def __init__(self, backing: Path, seed: int) -> None:
        self.backing = backing
        self.owner = BackingDirectory(backing, NODE, REAL)
        for name in ("x", "y"):
            stage(self.owner, name)
        self.claimers = [adopter(backing, by) for by in ("n7", "n8", "n9")]
        self.turns = Turns(seed, len(self.claimers) + 1)
        self.taken: dict[int, int] = {}
        """Term of each that has it, as soon as it knows."""
        self.wrong: list[str] = []

    def claim(self, number: int) -> None:
        self.turns.here.number = number
        terms = self.claimers[number]
        try:
            with suppress(OSError):
                self.taken[number] = terms.take()
                for file in range(3):
                    self.put(terms._opener, self.taken[number], f"{number}-{file}")
        finally:
            self.turns.end()

    def put(self, opener: Opener, term: int, name: str) -> None:
        own = os.open(
            self.backing / ".acpfs/staging" / name_in_term(NODE.encode(), term).decode(),
            os.O_RDONLY | os.O_DIRECTORY,
        )
        try:
            os.close(os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=own))
            os.rename(name, name, src_dir_fd=own, dst_dir_fd=opener.root_fd)
        finally:
            os.close(own)
        self.check(term)

    def check(self, term: int) -> None:
        """What is done in a term after a later one has begun is what must never be."""
        if any(later > term for later in self.taken.values()):
            self.wrong.append(f"in term {term}, when there were {self.taken}")

    def work(self) -> None:
        self.turns.here.number = len(self.claimers)
        try:
            with suppress(SupersededError):
                for name in ("z1", "z2"):
                    stage(self.owner, name)
                for name in ("z1", "x"):
                    self.owner.rename(self.owner.staging_path(name), (name.encode(),))
                    self.check(0)
        except OSError as error:
            self.wrong.append(repr(error))
        finally:
            self.turns.end()

    def run(self) -> None:
        numbers = range(len(self.claimers))
        threads = [threading.Thread(target=self.claim, args=(number,)) for number in numbers]
        threads.append(threading.Thread(target=self.work))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()


@pytest.mark.parametrize("seed", range(200))
@clause("S553")
def test_claimers_in_any_order_of_calls_leave_one_owner_with_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    race = Race(tmp_path, seed)
    for name in ("link", "mkdir", "rename", "rmdir", "unlink", "listdir", "open", "stat"):
        monkeypatch.setattr(os, name, race.turns.gated(getattr(os, name)))
    race.run()
    monkeypatch.undo()
    assert race.wrong == []
    assert len(set(race.taken.values())) == len(race.taken)
    term = adopter(tmp_path, "last").take()
    assert all(term > earlier for earlier in race.taken.values())
    directories = [p.name for p in (tmp_path / ".acpfs/staging").iterdir() if p.is_dir()]
    assert directories == [f"{NODE}+{term}"]
    found = staged(tmp_path)
    assert found["y"] == b"new"
    assert (tmp_path / "x").exists() or found["x"] == b"new"
    race.owner.disconnect()


@clause("S554")
def test_a_directory_that_was_removed_while_nothing_was_mounted_is_not_made_again(
    tmp_path: Path,
) -> None:
    first = BackingDirectory(tmp_path, NODE, REAL)
    first._entries.terms.lost(NODE.encode())
    first.disconnect()
    shutil.rmtree(tmp_path / f".acpfs/staging/{NODE}+1")
    again = BackingDirectory(tmp_path, NODE, REAL)
    stage(again, "x")
    assert [path.parent.name for path in tmp_path.glob(".acpfs/staging/*/x")] == [f"{NODE}+2"]
    again.disconnect()


# -- what is cleared


@clause("S553")
def test_what_was_taken_over_is_not_cleared_away_after_a_reboot(tmp_path: Path) -> None:
    """Whoever has the log drains what is staged; by nobody else's claim it may go."""
    node = "h-dead"
    here = MachineId("h", "hardware", "this boot")
    dead = BackingDirectory(tmp_path, node, REAL)
    stage(dead, "x")
    dead.write_own(
        (b"nodes", node.encode()), b'{"host": "h", "hardware": "hardware", "boot_id": "earlier"}'
    )
    dead._entries.terms.lost(node.encode())
    opener = dead._entries.opener
    taker = NodeTerms(opener, node, REAL, OTHER)
    taker.take()
    mine = BackingDirectory(tmp_path, "h-new", REAL)
    assert leftovers.clear(mine, here, REAL.clock) == []
    assert staged(tmp_path) == {"x": b"new"}
    NodeTerms(opener, node, REAL).take()
    assert leftovers.clear(mine, here, REAL.clock) == []
    assert [path.name for path in (tmp_path / ".acpfs/staging").iterdir()] == ["h-new"]
    assert list((tmp_path / ".acpfs/claims").iterdir()) == []
    mine.disconnect()
    dead.disconnect()
