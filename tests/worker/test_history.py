"""What happened to a mount is kept, bounded, over workers and mounts, and is written by nobody's
call.
"""

from __future__ import annotations

import csv
import io
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import trio

from acpfs.checkpoints import Checkpoint
from acpfs.cli import history_page
from acpfs.control.reports import CheckpointReport, HealthReport, HistoryEntry, Status
from acpfs.drain_records import ConflictReport
from acpfs.filesystem.loads import Load
from acpfs.ram.state import StateDatabase
from acpfs.types import Ino
from acpfs.worker import history
from acpfs.worker.assembly import Parts
from acpfs.worker.history import History
from acpfs.worker.history_watch import HistoryWatch, SeenStatus, begun, changes, loaded
from tests.control.double import DoubleSubject, report_of
from tests.filesystem.world import settings_for, world
from tests.rig.mounts import AcpfsMount
from tests.rig.runtime import REAL, clock_of
from tests.rig.storage.servers import until

pytestmark = pytest.mark.clause("S322")


def save(number: int, at: float = 0.0, files: int = 1) -> HistoryEntry:
    path = f"run/step-{number}"
    return HistoryEntry(
        at or 100.0 + number,
        "checkpoint",
        "persisted",
        path,
        number,
        files,
        5,
        90.0 + number,
        2.0,
        7.0,
    )


STEP = Checkpoint(b"run", b"step-3", 3, 0)


def test_a_load_says_when_how_long_and_from_where() -> None:
    entry = loaded(
        STEP,
        Load(10.0, 12.0, {Ino(5): 7, Ino(6): 8}, {"ram", "backing"}),
        1000.0,
    )
    assert (entry.path, entry.step, entry.files, entry.bytes, entry.loaded_from) == (
        "run/step-3",
        3,
        2,
        15,
        "mixed",
    )
    assert (entry.load_s, entry.began_at, entry.at) == (2.0, 1010.0, 1012.0)


def status() -> Status:
    async def make() -> Status:
        return DoubleSubject().status()

    return trio.run(make)


def test_entries_are_kept_over_workers_and_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "ENTRIES_MAX", 3)
    state = StateDatabase(tmp_path / "state.sqlite", REAL)
    kept = History(state)
    for number in range(5):
        kept.note(save(number))
    kept.note(save(4, at=200.0, files=2))  # it went on
    state.commit()
    state.close()
    state = StateDatabase(tmp_path / "state.sqlite", REAL)
    found = History(state)
    assert found.entries() == [save(2), save(3), save(4, at=200.0, files=2)]
    found.note(save(5))
    assert [entry.step for entry in found.entries()] == [3, 5, 4], "oldest first"
    state.close()


def test_what_is_noted_late_stands_where_it_happened(tmp_path: Path) -> None:
    """A look notes what the storage says now, and checkpoints that were persisted before."""
    state = StateDatabase(tmp_path / "state.sqlite", REAL)
    kept = History(state)
    kept.note(HistoryEntry(150.0, "storage", "ok → refusing"))
    kept.note(save(1, at=140.0))
    assert [entry.at for entry in kept.entries()] == [140.0, 150.0]
    state.close()


def test_the_same_again_costs_no_row(tmp_path: Path) -> None:
    state = StateDatabase(tmp_path / "state.sqlite", REAL)
    kept = History(state)
    kept.note(save(1))
    before = state.changes
    kept.note(save(1))
    assert state.changes == before
    state.close()


@pytest.mark.parametrize(
    "content",
    ["{", '{"entries": 5}', '{"entries": [5, {"kind": "x"}]}'],
    ids=["torn", "no list", "no entries"],
)
def test_what_a_mount_has_kept_may_be_damaged(tmp_path: Path, content: str) -> None:
    settings = settings_for(tmp_path)
    state = StateDatabase(tmp_path / "state.sqlite", REAL)
    kept = History(state)
    kept.note(save(1))
    kept.keep(settings, tmp_path)
    (file,) = tmp_path.glob("remembered/history/*")
    again = History(StateDatabase(tmp_path / "second.sqlite", REAL))
    again.recall(settings, tmp_path)
    assert again.entries() == [save(1)]
    file.write_text(content)
    empty = History(StateDatabase(tmp_path / "third.sqlite", REAL))
    empty.recall(settings, tmp_path)
    assert empty.entries() == []


def test_each_change_is_told_once() -> None:
    calm = status()
    assert begun(calm)[0] == "mount"
    kind, text = begun(
        replace(calm, worker=replace(calm.worker, number=2, last_end="died", pause_s=0.25))
    )
    assert kind == "takeover"
    assert "died; pause 0.2 s" in text
    bad = replace(
        calm,
        backing_health=HealthReport("stuck", 0.0, 1, 1, 9.0, 0),
        parked=2,
        interrupted=1,
        conflicts=[ConflictReport("a", "store", None, 0.0)],
        conflicts_total=1,
        bypassed_since=1.0,
        bypass_reason="operator",
    )
    told = changes(SeenStatus.of(calm), SeenStatus.of(bad), "stream is out for 9 s")
    assert [kind for kind, _text in told] == [
        "storage",
        "refused",
        "interrupted",
        "conflict",
        "bypass",
    ]
    assert told[0][1] == "ok → stuck: stream is out for 9 s"
    assert changes(SeenStatus.of(bad), SeenStatus.of(bad), "stream is out for 14 s") == []
    assert changes(SeenStatus(missing=("a",)), SeenStatus(missing=("b",)), "") == [
        ("member", "b is missing"),
        ("member", "a is not missing any more"),
    ]


@pytest.mark.clause("S603")
def test_the_history_says_who_is_adopted() -> None:
    held = SeenStatus(held=("n3", "n4"))
    claimed = SeenStatus(held=("n3", "n4"), claimed=("n3", "n4"))
    ended = SeenStatus(held=("n4",))
    assert changes(held, claimed, "") == [
        ("copies", "the log of n3 is being adopted"),
        ("copies", "the log of n4 is being adopted"),
    ]
    assert changes(claimed, claimed, "") == []
    assert changes(claimed, ended, "") == [
        ("copies", "n3 is adopted: what it had copied here is on the storage"),
        ("copies", "n4 is not adopted: what is held of it is open to it again"),
    ]


def test_a_look_that_fails_ends_nothing_and_the_next_one_notes_the_same(tmp_path: Path) -> None:
    """A checkpoint settles once more, and another does, while a look is at it."""
    first = Checkpoint(b"run", b"step-1", 1)
    second = Checkpoint(b"run", b"step-2", 2)
    seen: list[bytes] = []

    async def main() -> None:
        async with world(tmp_path) as w:
            settled = w.inner.catalogue
            with w.fs.lock:  # the drain's threads have steps of their own
                kept = History(w.state)

            def reports(path: bytes) -> list[CheckpointReport]:
                seen.append(path)
                if len(seen) == 1:
                    raise OSError("a look that fails")
                if len(seen) == 2:
                    settled._newly_settled |= {first: 2, second: 3}
                return [
                    report_of(
                        os.fsdecode(path), 1, step=int(path[-1:]), persisted_at=100.0 + len(seen)
                    )
                ]

            parts = cast(
                "Parts",
                SimpleNamespace(
                    fs=w.fs,
                    inner=w.inner,
                    history=kept,
                    state=w.state,
                    given=replace(REAL, clock=clock_of(wall=lambda: 99.0)),
                ),
            )
            watch = HistoryWatch(parts, DoubleSubject().status, reports)
            settled._newly_settled[first] = 1
            for _ in range(4):
                watch.look()
            assert seen == [b"run/step-1"] * 3 + [b"run/step-2"]
            saves = [entry for entry in kept.entries() if entry.kind == "checkpoint"]
            assert [(entry.step, entry.at) for entry in saves] == [(1, 103.0), (2, 104.0)]
            assert [entry.kind for entry in kept.entries() if entry.kind != "checkpoint"] == [
                "mount"
            ]
            assert settled.newly_settled() == {}

    trio.run(main)


def test_the_page_has_a_point_for_each_save_and_no_text_of_others_as_markup() -> None:
    trouble = HistoryEntry(101.0, "storage", "ok → stuck: <script>")
    load = loaded(STEP, Load(1.0, 3.0, {Ino(5): 7}, {"ram"}), 200.0)
    entries = [
        json.loads(json.dumps({name: getattr(entry, name) for name in HistoryEntry.__slots__}))
        for entry in (save(1), save(2), load, trouble)
    ]
    page = history_page.html("/mnt/<b>", entries)
    assert page.count("<circle") == 3 * 2 + 1
    assert "loaded from ram" in page
    assert "<script>" not in page
    assert "/mnt/&lt;b&gt;" in page
    assert "None yet" in history_page.html("/m", [entries[-1]])


@pytest.mark.mount
@pytest.mark.skipif(
    os.geteuid() != 0 or not os.access("/dev/fuse", os.W_OK), reason="needs root and /dev/fuse"
)
def test_a_mount_tells_what_earlier_ones_have_saved(tmp_path: Path) -> None:
    (tmp_path / "backing").mkdir()
    with AcpfsMount(tmp_path / "backing", tmp_path / "mnt", "native") as mount:
        (mount.path / "run").mkdir()
        (mount.path / "run/step-1").mkdir()
        (mount.path / "run/step-1/model.pt").write_bytes(b"x" * 1000)
        mount.umount()
        mount.start()
        told = mount.ctl("history")
        assert [entry["kind"] for entry in told[:2]] == ["mount", "checkpoint"]
        assert {name: told[1][name] for name in ("path", "step", "files", "bytes")} == {
            "path": "run/step-1", "step": 1, "files": 1, "bytes": 1000,
        }  # fmt: skip
        assert told[1]["persist_s"] >= told[1]["save_s"] >= 0
        at = str(mount.path)
        assert "run/step-1" in mount.run("acpfs-ctl", at, "history").stdout
        rows = list(
            csv.DictReader(
                io.StringIO(
                    mount.run("acpfs-ctl", at, "history", "--csv", "--kind", "checkpoint").stdout
                )
            )
        )
        assert [row["path"] for row in rows] == ["run/step-1"]
        mount.run("acpfs-ctl", at, "history", "--html", str(tmp_path / "page.html"))
        assert "step-1" in (tmp_path / "page.html").read_text()


@pytest.mark.long
@pytest.mark.mount
@pytest.mark.skipif(
    os.geteuid() != 0 or not os.access("/dev/fuse", os.W_OK), reason="needs root and /dev/fuse"
)
def test_a_mount_tells_what_was_loaded(tmp_path: Path) -> None:
    (tmp_path / "backing/run/step-1").mkdir(parents=True)
    (tmp_path / "backing/run/step-1/model.pt").write_bytes(b"x" * (2 << 20))
    with AcpfsMount(tmp_path / "backing", tmp_path / "mnt", "native") as mount:

        def told() -> list[str]:
            return [entry["loaded_from"] for entry in mount.ctl("history")]

        for place in ("backing", "ram"):
            assert len((mount.path / "run/step-1/model.pt").read_bytes()) == 2 << 20
            until(lambda place=place: place in told(), "the load is in the history", 60)  # type: ignore[misc]
        text = mount.run("acpfs-ctl", str(mount.path), "history", "--kind", "load").stdout
        assert (
            "loaded from backing" in text,
            "loaded from ram" in text,
            text.count("run/step-1"),
        ) == (True, True, 2)
