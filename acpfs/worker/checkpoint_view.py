"""Checkpoints as control shows them: files of the upper tree and of the manifest, put together by
shape of name.

Takes the file system's lock for each part of the answer, and calls the backing directory for
nothing but sizes (`learn`). What was written or looked at through this mount is shown. A checkpoint
that lies on the backing directory and was never touched is not known here.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import trio

from acpfs.backing.read_rate import ReadRate
from acpfs.checkpoints import Checkpoint
from acpfs.control.reports import CheckpointFile, CheckpointReport
from acpfs.filesystem.catalogue import CheckpointTimes
from acpfs.filesystem.eviction import below
from acpfs.filesystem.known_files import KnownFile
from acpfs.filesystem.steps import settled
from acpfs.worker.assembly import Parts

MEASURED_BYTES = 64 << 20
"""Read from RAM to see how fast that is: some 20 ms."""
MEASURE_AGAIN_S = 600.0


@dataclass(slots=True)
class _Sum:
    files: int = 0
    persisted: int = 0
    writing: int = 0
    halves: int = 0
    damaged: int = 0
    """Files that were read back and are not what was stored."""
    size: int = 0
    unsized: int = 0
    """Files whose size is not known, because the backing directory did not say."""
    ram: int = 0
    spilled: int = 0
    copied: int = 0
    """Files that are not persisted, and that another member has."""
    times: CheckpointTimes | None = field(default=None)

    def add(self, file: KnownFile) -> None:
        self.files += 1
        self.persisted += file.is_persisted
        self.writing += file.is_writing
        self.halves += file.is_half
        self.size += max(0, file.size)
        self.unsized += file.size < 0
        self.ram += file.ram_bytes
        self.spilled += file.spilled_bytes


def _around(save_dir: bytes, path: bytes) -> bytes:
    """Below what the files of a checkpoint lie.

    Only one with `*` in its name has them beside others': a walk over all takes long.
    """
    return save_dir if b"*" in path else path


class CheckpointView:
    """See above."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._now = parts.given.clock.now
        self._ram_rate = ReadRate()
        self._measured_at = 0.0
        self._learning: Future[None] = Future()
        self._learning.set_result(None)

    def files(self, report: CheckpointReport) -> list[CheckpointFile]:
        """Files of a checkpoint, in order; sizes, and checksums of what is persisted."""
        recognise = self._parts.inner.catalogue.recognise
        path = os.fsencode(report.path)
        files = self._known(_around(os.fsencode(report.save_dir), path))
        ours = (
            self._file(file)
            for file in files
            if (c := recognise(file.path)) is not None and c.path == path
        )
        return sorted(ours, key=lambda file: file.path)

    async def learn(self, path: bytes) -> None:
        """Have the sizes of what an earlier mount stored; go on without them when the backing
        directory does not say.
        """
        if self._learning.done():
            manifest = self._parts.manifest
            below = self._scope(path)
            self._learning = self._parts.calls.requests.submit(
                "sizes", manifest.learn_sizes, tuple(below.split(b"/")) if below else ()
            )
        with trio.move_on_after(self._parts.settings.patience_s):
            await settled(self._learning)

    def _scope(self, path: bytes) -> bytes:
        """Where files of what is asked for may lie: a path in a checkpoint stands for that, which
        may have files beside it.
        """
        with self._parts.fs.lock:
            top = self._parts.inner.catalogue.recognise(path, directory=True)
        return path if top is None else _around(top.save_dir, top.path)

    def moments(self, report: CheckpointReport) -> tuple[float, float]:
        """(last close, last persisted) by the clock of the machine."""
        save_dir = os.fsencode(report.save_dir)
        path = os.fsencode(report.path)
        name = path[len(save_dir) + 1 :] if save_dir else path
        with self._parts.fs.lock:
            found = self._parts.inner.catalogue.moments(
                Checkpoint(save_dir, name, report.step, report.epoch)
            )
            return found.closed, found.persisted

    def _file(self, file: KnownFile) -> CheckpointFile:
        with self._parts.fs.lock:
            checksum = (
                self._parts.manifest.digest(tuple(file.path.split(b"/")))
                if file.is_persisted
                else ""
            )
        return CheckpointFile(
            os.fsdecode(file.path), max(0, file.size), file.is_persisted, checksum or None
        )

    def persisted_files(self, path: bytes) -> tuple[int, int]:
        """(persisted, all) files at and below a path."""
        files = list(self._known(path))
        return sum(file.is_persisted for file in files), len(files)

    def _known(self, path: bytes) -> Iterator[KnownFile]:
        """From the upper tree, and from the manifest what has left it; there a size of -1 is not
        known.
        """
        lock = self._parts.fs.lock
        files = self._parts.inner.known_files
        with lock:
            known = {file.path: file for file in files.below(path)}
        yield from known.values()
        for row, _digest, size in self._parts.manifest.rows(
            tuple(path.split(b"/")) if path else ()
        ):
            if row not in known:
                with lock:
                    gone = files.is_gone(row)
                if not gone:
                    yield KnownFile(
                        row, size, 0, 0, is_writing=False, is_half=False, is_persisted=True
                    )

    # -- checkpoints

    def read_back(self, path: bytes, *, is_whole: bool) -> None:
        """A file of the backing directory was held against what was stored there."""
        with self._parts.fs.lock, self._parts.state.step():
            damaged = self._parts.inner.catalogue.damaged
            if is_whole == (path not in damaged):
                return  # as it is known already: most of thousands of files
            if is_whole:
                damaged.whole(path)
            else:
                damaged.found(path)

    def verified(self, path: bytes, good: Collection[bytes], since: float) -> None:
        """Files at and below a path were read back from `since` on: note checkpoints that lie there
        whole and were good.
        """
        catalogue = self._parts.inner.catalogue
        whole: dict[Checkpoint, bool] = {}
        for file in self._known(path):
            checkpoint = catalogue.recognise(file.path)
            if checkpoint is not None and below(checkpoint.path, path):
                whole[checkpoint] = whole.get(checkpoint, True) and file.path in good
        with self._parts.fs.lock, self._parts.state.step():
            for checkpoint in (checkpoint for checkpoint, is_good in whole.items() if is_good):
                catalogue.verified(checkpoint, since)

    def reports(self, path: bytes) -> list[CheckpointReport]:
        """Checkpoints at and below a path, or those that it lies in; by save_dir, oldest first."""
        lock = self._parts.fs.lock
        catalogue = self._parts.inner.catalogue
        with lock:
            top = catalogue.recognise(path, directory=True)
            copied_until, holder = self._copied()
        sums: dict[Checkpoint, _Sum] = {}
        for file in self._known(_around(top.save_dir, top.path) if top is not None else path):
            checkpoint = catalogue.recognise(file.path)
            if checkpoint is not None and top in (None, checkpoint):
                total = sums.setdefault(checkpoint, _Sum())
                total.add(file)
                until = file.logged_until
                total.copied += until is not None and until <= copied_until
                total.damaged += file.is_persisted and file.path in catalogue.damaged
        with lock:
            for checkpoint, total in sums.items():
                total.times = catalogue.times(checkpoint)
        ordered = sorted(sums, key=lambda c: (c.save_dir, c.order, _closed(sums[c])))
        return [self._report(checkpoint, sums[checkpoint], holder) for checkpoint in ordered]

    def _copied(self) -> tuple[int, str]:
        """Number of the last operation that another member has, with all before it, and which one;
        (-1, ""): none has. Under the lock.
        """
        spilling = self._parts.inner.spilling
        if spilling is None or not spilling.copies_to_members or spilling.spill.mirror is None:
            return -1, ""
        holder = spilling.spill.mirror.statistics().counts_at
        return (spilling.unmirrored().until, holder) if holder else (-1, "")

    def _report(self, checkpoint: Checkpoint, total: _Sum, holder: str) -> CheckpointReport:
        times = total.times or CheckpointTimes(0.0)
        persisted_at = times.persisted_at if total.persisted == total.files else 0.0
        return CheckpointReport(
            path=os.fsdecode(checkpoint.path),
            save_dir=os.fsdecode(checkpoint.save_dir),
            step=checkpoint.step,
            epoch=checkpoint.epoch,
            state=_state(total, times, persisted_at),
            files=total.files,
            persisted_files=total.persisted,
            bytes=total.size,
            ram_bytes=total.ram,
            began_at=times.began_at or None,
            closed_at=times.closed_at or None,
            persisted_at=persisted_at or None,
            verified_at=max(0.0, times.verified_at) or None,
            copied_files=total.copied,
            holder=holder if total.copied else None,
            save_s=max(0.0, times.closed_at - times.began_at)
            if times.began_at and times.closed_at
            else None,
            persist_s=max(0.0, persisted_at - times.began_at)
            if times.began_at and persisted_at
            else None,
            loads_from=_place(total),
            estimated_load_s=None
            if total.spilled or total.unsized
            else self._load_s(total.ram, total.size - total.ram),
        )

    def _load_s(self, ram_bytes: int, cold_bytes: int) -> float | None:
        """From measured rates; None where one of them is not known."""
        seconds = 0.0
        for size, rate in (
            (ram_bytes, self._ram_rate),
            (cold_bytes, self._parts.inner.lower_view.read_rate),
        ):
            bytes_per_s = rate.bytes_per_s
            if size and bytes_per_s is None:
                return None
            seconds += size / bytes_per_s if size and bytes_per_s else 0.0
        return seconds

    def measure(self) -> None:
        """Read something of what is in RAM, to see how fast that is; in a thread, now and then."""
        if (
            self._now() - self._measured_at < MEASURE_AGAIN_S
            and self._ram_rate.bytes_per_s is not None
        ):
            return
        self._measured_at = self._now()
        tier = self._parts.tier
        with self._parts.fs.lock:
            tier_id = max(tier.ids(), key=tier.allocated_bytes, default=None)
            fd = -1 if tier_id is None else tier.open(tier_id)
        if fd < 0:
            return
        try:
            buffer = bytearray(4 << 20)
            began = self._now()
            done = 0
            while done < MEASURED_BYTES and (count := os.preadv(fd, [buffer], done)):
                done += count
            self._ram_rate.note(done, self._now() - began)
        finally:
            os.close(fd)


def _place(total: _Sum) -> str:
    places = {
        "ram": total.ram,
        "spill": total.spilled,
        "backing": total.size - total.ram - total.spilled,
    }
    used = [
        place for place, size in places.items() if size or (place == "backing" and total.unsized)
    ]
    return "mixed" if len(used) > 1 else used[0] if used else "ram"


def _closed(total: _Sum) -> float:
    return total.times.closed_at if total.times is not None else 0.0


def _state(total: _Sum, times: CheckpointTimes, persisted_at: float) -> str:
    if total.writing:
        return "writing"
    if total.halves:
        return "interrupted"
    if total.persisted < total.files:
        return "persisting" if total.persisted else "complete"
    if total.damaged:
        return "damaged"
    if not (total.ram or total.spilled) and (total.size or total.unsized):
        return "evicted"
    return "verified" if times.verified_at >= persisted_at > 0 else "persisted"
