"""What a member holds for others: whose words it heeds, and what it counts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from threading import Event, RLock, Thread, current_thread
from typing import Any

import pytest

from acpfs.exchange.exchange_records import PUT_BYTES_MAX
from acpfs.ram.tier import HELD, Tier
from acpfs.worker.held_copies_watch import HeldCopiesWatch
from acpfs.writeback.copies.held_copies import FILES_MAX, SESSIONS_MAX, HeldCopies
from tests.rig.runtime import REAL
from tests.rig.storage.servers import until
from tests.writeback.memory_lower import MemoryLower

clause = pytest.mark.clause
MIB = 1 << 20
VOLUME = "7" * 32
SESSION = "0123456789abcdef"


def made(tmp_path: Path, budget: int | str = "50%", ram: int = 64 * MIB) -> tuple[HeldCopies, Tier]:
    tier = Tier(tmp_path, ram, REAL)
    return HeldCopies(tier, RLock(), VOLUME, budget, REAL), tier


def begun(tmp_path: Path, **changes: Any) -> tuple[HeldCopies, Tier]:
    holding, tier = made(tmp_path, **changes)
    assert holding.heed("n1", {"what": "begin", "session": SESSION})["ok"] is True
    return holding, tier


def put(holding: HeldCopies, name: str, size: int, at: int = 0, origin: str = "n1") -> str:
    """ "": it was taken, else why not."""
    said = {"session": SESSION, "name": name, "at": at, "size": size}
    answer, fd = holding.room(origin, said)
    if fd < 0:
        return str(answer["refused"])
    os.pwrite(fd, bytes([7]) * size, at)
    os.close(fd)
    return ""


def on_disk(tmp_path: Path) -> dict[str, int]:
    files = (tmp_path / "data" / HELD).rglob("acpfs-*/*")
    return {path.name: path.stat().st_size for path in files}


COPY = "17-0123456789ab"


@clause("S583")
def test_every_byte_is_counted_and_given_back(tmp_path: Path) -> None:
    holding, tier = begun(tmp_path)
    assert put(holding, COPY, 3 * MIB) == ""
    assert put(holding, COPY, MIB, 3 * MIB) == ""
    assert put(holding, f"mirror-{SESSION}.log", 10) == ""
    assert tier.held_bytes == 4 * MIB + 4096
    assert tier.free_bytes() == 60 * MIB - 4096
    assert on_disk(tmp_path) == {COPY: 4 * MIB, f"mirror-{SESSION}.log": 10}
    (told,) = holding.statistics()
    assert (told.origin, told.files, told.bytes) == ("n1", 2, tier.held_bytes)
    assert holding.heed("n1", {"what": "remove", "session": SESSION, "names": [COPY]})["ok"]
    holding.delete_gone()
    assert tier.held_bytes == 4096
    assert holding.heed("n1", {"what": "release", "session": SESSION})["ok"]
    holding.delete_gone()
    assert tier.held_bytes == 0
    assert list((tmp_path / "data" / HELD).rglob("*")) == []


@clause("S583")
def test_what_it_gives_is_bounded_and_our_own_writers_come_first(tmp_path: Path) -> None:
    holding, tier = begun(tmp_path, budget=4 * MIB)
    assert put(holding, COPY, 4 * MIB) == ""
    assert put(holding, "18-0123456789ab", 1) == "what it gives to others is full"
    assert tier.held_bytes == 4 * MIB
    assert holding.offered() == 0
    assert not tier.reserve_nowait(61 * MIB)
    tier.reserve(61 * MIB)  # somebody waits
    assert holding.heed("n1", {"what": "remove", "session": SESSION, "names": [COPY]})["ok"]
    holding.delete_gone()
    assert tier.reserved_bytes == 61 * MIB  # and was served at once
    tier.release(1 * MIB)
    assert put(holding, COPY, 4 * MIB) == ""
    assert put(holding, "19-0123456789ab", 1) != ""


@clause("S583")
def test_a_member_that_gives_nothing_says_so(tmp_path: Path) -> None:
    holding, _tier = made(tmp_path, budget=0)
    answer = holding.heed("n1", {"what": "begin", "session": SESSION})
    assert answer == {"refused": "it holds nothing for others"}
    assert holding.offered() == -1


@clause("S585")
@pytest.mark.parametrize(
    "name",
    [
        "../../1",
        "1",
        "1-0123456789AB",
        "/etc/passwd",
        "",
        "about.json",
        "0-0123456789ab",
        "mirror-0123456789abcdef.sqlite",
        "1-0123456789ab\n",
        "1-0123456789ab/x",
        None,
        5,
    ],
)
def test_names_have_a_form(tmp_path: Path, name: object) -> None:
    holding, tier = begun(tmp_path)
    said = {"session": SESSION, "name": name, "at": 0, "size": 5}
    answer, fd = holding.room("n1", said)
    assert fd == -1
    assert "name" in answer["refused"]
    for what in ({"what": "whole", "name": name, "size": 1}, {"what": "remove", "names": [name]}):
        assert "name" in holding.heed("n1", {"session": SESSION, **what})["refused"]
    assert tier.held_bytes == 0
    assert on_disk(tmp_path) == {}


@clause("S585")
@pytest.mark.parametrize(
    "said",
    [
        None,
        [],
        {},
        {"what": "begin"},
        {"what": "begin", "session": "../../../x"},
        {"what": "burn", "session": SESSION},
        {"what": "names", "session": SESSION},
        {"what": "remove", "session": SESSION, "names": "17"},
        {"what": "remove", "session": SESSION, "names": [COPY] * 1000},
        {"what": "whole", "session": SESSION, "name": COPY, "size": -1},
        {"what": "whole", "session": SESSION, "name": COPY, "size": 1 << 61},
        {"what": "clock", "session": SESSION, "clock": "soon"},
        {"what": "release", "session": "f" * 16},
    ],
)
def test_words_that_make_no_sense_are_refused_with_a_sentence(tmp_path: Path, said: object) -> None:
    holding, tier = begun(tmp_path)
    answer = holding.heed("n1", said)
    assert isinstance(answer["refused"], str)
    assert answer["refused"] != ""
    assert tier.held_bytes == 0
    assert holding.refusals == 1


@clause("S585")
def test_nobody_reaches_what_is_held_of_somebody_else(tmp_path: Path) -> None:
    """A session is known by the node that has shown its key, whatever is said."""
    holding, _tier = begun(tmp_path)
    assert put(holding, COPY, 5) == ""
    assert "no such session" in put(holding, COPY, 5, origin="n2")
    for what in ("names", "release", "remove", "clock"):
        answer = holding.heed("n2", {"what": what, "session": SESSION})
        assert "no such session" in answer["refused"]
    assert on_disk(tmp_path) == {COPY: 5}


@clause("S585")
@pytest.mark.parametrize("size", [0, -1, PUT_BYTES_MAX + 1, True, 1.5, "5"])
def test_pieces_have_a_size(tmp_path: Path, size: object) -> None:
    holding, _tier = begun(tmp_path)
    answer, fd = holding.room("n1", {"session": SESSION, "name": COPY, "at": 0, "size": size})
    assert fd == -1
    assert "size" in answer["refused"]


@clause("S585")
def test_sessions_and_files_are_bounded(tmp_path: Path) -> None:
    holding, _tier = made(tmp_path)
    for number in range(SESSIONS_MAX):
        assert holding.heed(f"n{number}", {"what": "begin", "session": SESSION})["ok"]
    answer = holding.heed("more", {"what": "begin", "session": SESSION})
    assert answer == {"refused": "it holds copies of too many members"}
    session = holding._sessions["n1", SESSION]
    session.files = dict.fromkeys((f"{n}-0123456789ab" for n in range(1, FILES_MAX + 1)), 0)
    assert put(holding, f"{FILES_MAX + 1}-0123456789ab", 1) == (
        "it holds too many files of that member"
    )


@clause("S583", "S586")
def test_the_next_worker_counts_what_is_there_and_goes_on(tmp_path: Path) -> None:
    holding, tier = begun(tmp_path)
    assert put(holding, COPY, 3 * MIB) == ""
    assert holding.heed("n1", {"what": "clock", "session": SESSION, "clock": 12.5})["ok"]
    held = tier.held_bytes
    tier.close()
    again, tier = made(tmp_path)
    assert tier.held_bytes == held
    assert tier.ids() == []  # none of ours
    (told,) = again.statistics()
    assert told.until == 12.5
    assert again.heed("n1", {"what": "begin", "session": SESSION, "resume": True})["ok"]
    assert again.heed("n1", {"what": "names", "session": SESSION, "after": ""}) == {
        "names": [COPY],
        "more": False,
    }
    other = "f" * 16
    answer = again.heed("n1", {"what": "begin", "session": other, "resume": True})
    assert "no such session" in answer["refused"]


@clause("S586")
def test_a_session_that_counts_no_more_goes_and_one_that_does_stays(tmp_path: Path) -> None:
    holding, tier = begun(tmp_path)
    assert put(holding, COPY, MIB) == ""
    assert holding.idle() == []
    holding._sessions["n1", SESSION].heard_at -= 1000.0
    assert holding.idle() == ["n1"]
    holding.judge("n1", lambda token: token == SESSION)
    assert tier.held_bytes == MIB
    holding.judge("n1", lambda _token: False)
    holding.delete_gone()
    assert tier.held_bytes == 0
    assert holding.statistics() == []


@clause("S583")
def test_a_worker_that_died_in_the_middle_leaves_nothing_that_stops_the_next_one(
    tmp_path: Path,
) -> None:
    """A session without its directory of files, and what it was deleting."""
    _holding, tier = begun(tmp_path)
    held = tmp_path / "data" / HELD
    (held / "n1" / SESSION / f"acpfs-{VOLUME}-n1").rmdir()
    (held / ".gone-7" / "acpfs-x").mkdir(parents=True)
    (held / ".gone-7" / "acpfs-x" / COPY).write_bytes(b"x" * 100)
    (held / ".gone-8").write_bytes(b"x" * 100)
    again = HeldCopies(tier, RLock(), VOLUME, "50%", REAL)
    assert put(again, COPY, 100) == ""
    assert again.heed("n1", {"what": "remove", "session": SESSION, "names": [COPY]})["ok"]
    again.delete_gone()
    assert [path.name for path in held.iterdir()] == ["n1"]


@clause("S583")
def test_what_goes_is_deleted_without_the_lock_and_counted_until_it_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tmpfs needs a while for many or large files, and each request waits for the lock."""
    tier = Tier(tmp_path, 64 * MIB, REAL)
    lock = RLock()
    holding = HeldCopies(tier, lock, VOLUME, "50%", REAL)
    assert holding.heed("n1", {"what": "begin", "session": SESSION})["ok"] is True
    assert put(holding, COPY, MIB) == ""
    assert put(holding, f"mirror-{SESSION}.log", 10) == ""
    seen = list[tuple[bool, int]]()

    def seen_by_others() -> None:
        free = lock.acquire(blocking=False)
        seen.append((free, tier.held_bytes))
        if free:
            lock.release()

    def look(delete: Any) -> Any:
        def deletes(path: Any, *more: Any, **options: Any) -> None:
            other = Thread(target=seen_by_others)
            other.start()
            other.join()
            delete(path, *more, **options)

        return deletes

    monkeypatch.setattr(Path, "unlink", look(Path.unlink))
    monkeypatch.setattr(shutil, "rmtree", look(shutil.rmtree))
    assert holding.heed("n1", {"what": "remove", "session": SESSION, "names": [COPY]})["ok"]
    holding.delete_gone()
    assert holding.heed("n1", {"what": "release", "session": SESSION})["ok"]
    holding.delete_gone()
    assert seen == [(True, MIB + 4096), (True, 4096)]
    assert tier.held_bytes == 0


@clause("S600")
def test_a_delete_that_takes_long_holds_up_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All members are answered in one thread. Whoever looks after what is held deletes, and goes on
    though the backing directory hangs.
    """
    holding, tier = begun(tmp_path)
    assert put(holding, COPY, MIB) == ""
    assert put(holding, f"mirror-{SESSION}.log", 10) == ""
    answers = current_thread()
    is_deleting = Event()
    go_on = Event()

    def blocks(delete: Any) -> Any:
        def deletes(path: Any, *more: Any, **options: Any) -> None:
            assert current_thread() is not answers, "deleted where members are answered"
            is_deleting.set()
            go_on.wait()
            delete(path, *more, **options)

        return deletes

    monkeypatch.setattr(Path, "unlink", blocks(Path.unlink))
    monkeypatch.setattr(shutil, "rmtree", blocks(shutil.rmtree))
    watch = HeldCopiesWatch(holding, MemoryLower(), REAL)
    watch.begin()
    try:
        assert holding.heed("n1", {"what": "remove", "session": SESSION, "names": [COPY]})["ok"]
        is_deleting.wait()
        assert holding.heed("n1", {"what": "clock", "session": SESSION, "clock": 1.0})["ok"]
        assert holding.heed("n1", {"what": "release", "session": SESSION})["ok"]
        assert tier.held_bytes == MIB + 4096
        go_on.set()
        until(lambda: tier.held_bytes == 0, "it is deleted", 60)
    finally:
        go_on.set()
        watch.close()


@clause("S587")
def test_what_was_adopted_goes_though_nobody_says_another_word(
    tmp_path: Path,
) -> None:
    holding, tier = begun(tmp_path)
    watch = HeldCopiesWatch(holding, MemoryLower(), REAL)
    watch.begin()
    try:
        assert put(holding, COPY, MIB) == ""
        holding.adopted("n1")
        until(lambda: tier.held_bytes == 0, "it is deleted", 60)
    finally:
        watch.close()
