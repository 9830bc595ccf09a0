"""What the benchmarks' figures stand on."""

from __future__ import annotations

import contextlib
import os
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import NoReturn

import pytest

from bench import bars
from bench import storage as slow
from bench.crashed import look
from bench.disk import Disk, NoDiskError, NoThrottleError
from bench.native import CHUNK, Samples
from bench.record import lower_quartile
from tests.rig.processes import Child


def written_bytes() -> int:
    """By this process, in all."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def test_memory_is_warmed_by_touching_it(tmp_path: Path) -> None:
    """Pages of a tmpfs that were allocated and not written are as cold as before."""
    size = CHUNK + 4096
    before = written_bytes()
    Samples(huge=tmp_path).warm_memory(size)
    assert written_bytes() - before >= size
    assert list(tmp_path.iterdir()) == []


def test_a_quarter_of_the_samples_is_not_above_the_lower_quartile() -> None:
    assert lower_quartile([9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]) == 3.0
    assert lower_quartile([5.0]) == 5.0


@pytest.mark.mount
def test_a_disk_that_loses_power_keeps_what_was_flushed_and_no_more(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        try:
            disk = stack.enter_context(Disk(tmp_path, 64 << 20))
        except NoDiskError as error:
            pytest.skip(str(error))
        with open(disk.path / "flushed", "wb") as file:
            file.write(b"a" * 100_000)
            file.flush()
            os.fsync(file.fileno())
        (disk.path / "not").write_bytes(b"b" * 100_000)
        disk.lose_power()
        with pytest.raises(OSError, match="error"):
            (disk.path / "later").touch()
        disk.come_back(tmp_path / "left")
        assert (tmp_path / "left" / "flushed").read_bytes() == b"a" * 100_000
        assert (
            not (tmp_path / "left" / "not").exists()
            or not (tmp_path / "left" / "not").stat().st_size
        )
    assert not list(tmp_path.glob("*.img"))


def test_a_pointer_to_half_a_checkpoint_is_found(tmp_path: Path) -> None:
    for step in (1, 2):
        (tmp_path / f"step-{step}").mkdir()
    (tmp_path / "latest").write_text("step-2")
    assert look(tmp_path, lambda step: True).pointer_is_true
    found = look(tmp_path, lambda step: step == 1)
    assert (found.whole, found.pointer, found.checksums) == ([1], "step-2", "none")
    assert not found.pointer_is_true
    (tmp_path / "latest").write_text("")
    assert not look(tmp_path, lambda step: True).pointer_is_true
    assert look(tmp_path / "nothing", lambda step: True).pointer_is_true


def test_bars_are_drawn_to_scale(tmp_path: Path) -> None:
    groups: bars.Groups = [("first", {"a & b": 2.0, "c": 1.0}), ("second", {"c": 0.0})]
    lines = bars.text(groups)
    assert [line.count("█") for line in lines] == [50, 25, 1]
    bars.svg("<title>", groups, tmp_path / "picture.svg")
    drawn = ET.parse(tmp_path / "picture.svg").getroot()
    widths = [
        float(rect.get("width", "0"))
        for rect in drawn.iter("{http://www.w3.org/2000/svg}rect")
        if rect.get("x") == str(bars.LEFT)
    ]
    assert widths[:3] == [560.0, 280.0, 1.0]


@pytest.mark.mount
def test_storage_that_nothing_throttles_is_a_process_that_freezes_and_loses_power_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unlimited(*_words: object) -> NoReturn:
        raise NoThrottleError("none here")

    monkeypatch.setattr(slow, "limited", unlimited)
    with slow.slow_storage(tmp_path, 64 << 20, 300_000_000) as storage:
        assert "none here" in storage.how
        if not storage.can_lose_power:
            pytest.skip(storage.how)
        with open(storage.path / "flushed", "wb") as file:
            file.write(b"a" * 5000)
            file.flush()
            os.fsync(file.fileno())
        with storage.frozen():
            child = Child(lambda: (storage.path / "late").write_bytes(b"b"))
            assert child.running()
        assert child.result() == 1
        storage.lose_power()
        left = storage.come_back(tmp_path / "left")
        assert (left / "flushed").read_bytes() == b"a" * 5000
