"""Preloading: files that somebody named, or the newest checkpoint, are brought to RAM in the
background.

Owns the jobs and how many files come at the same time. Runs in trio, in the worker's nursery; a
worker that dies takes its jobs along, a client that waits asks the next one again, and what has
come is not brought twice.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import trio

from acpfs.control.reports import PreloadedFile
from acpfs.errors import AcpfsError
from acpfs.filesystem.preloading import Found, Preloading
from acpfs.filesystem.steps import Steps
from acpfs.logger import get_logger
from acpfs.types import Ino
from acpfs.writeback.manifest.manifest import Manifest

LATEST = "latest"
AT_A_TIME = 4
"""Files on their way; each large one has four readers of its own."""
GOOD = ("verified", "unknown", "in RAM")

log = get_logger(__name__)


@dataclass(slots=True, eq=False)
class Job:
    """What one request brings."""

    steps: Steps
    preloading: Preloading
    paths: Sequence[bytes]
    files: list[Found] = field(default_factory=list)
    brought: list[PreloadedFile] = field(default_factory=list)
    coming: set[Ino] = field(default_factory=set)
    error: str = ""
    end: trio.Event = field(default_factory=trio.Event)

    def left(self) -> tuple[int, int]:
        """Files and bytes that have not come yet."""
        with self.steps.lock:
            came = sum(self.preloading.came(ino) for ino in self.coming)
        total = sum(found.size for found in self.files)
        return len(self.files) - len(self.brought), max(
            0, total - sum(b.size for b in self.brought) - came
        )

    async def ended(self) -> None:
        """Wait for the last one."""
        await self.end.wait()

    def outcome(self) -> list[PreloadedFile]:
        """How each file ended.

        Raises:
            AcpfsError: there is nothing at a path, or the backing directory does not answer.
        """
        if self.error:
            raise AcpfsError(self.error)
        return self.brought


class Preloads:
    """Takes jobs and works on them in turn."""

    def __init__(self, steps: Steps, preloading: Preloading, manifest: Manifest) -> None:
        self._steps = steps
        self._preloading = preloading
        self._manifest = manifest
        self._give, self._take = trio.open_memory_channel[Job](math.inf)

    def begin(self, paths: Sequence[bytes]) -> Job:
        """Put a job behind those that are under way; it goes on whoever waits for it."""
        job = Job(self._steps, self._preloading, paths)
        self._give.send_nowait(job)
        return job

    async def run(self, at_mount: str | None) -> None:
        """Until cancelled. `at_mount`: `latest`, or paths with `:` between them, to begin with."""
        if at_mount == LATEST:
            self.begin(())
        elif at_mount:
            self.begin([os.fsencode(path).strip(b"/") for path in at_mount.split(":")])
        async for job in self._take:
            try:
                await self._do(job)
            except OSError as error:
                where = f": {os.fsdecode(error.filename)}" if error.filename else ""
                job.error = f"{error.strerror or error}{where}"
                log.warning("preload: the backing directory does not give it", error=job.error)
            except Exception:
                # nobody's data depends on it: the mount goes on, and a worker that ended here would
                # end so again
                job.error = "a bug, see the log"
                log.exception("preload failed by a bug")
            finally:
                job.end.set()

    async def _do(self, job: Job) -> None:
        paths = job.paths or await self._steps.drive(self._preloading.latest())
        for path in paths:
            job.files += await self._steps.drive(self._preloading.files(path))
        waiting = iter(job.files)
        async with trio.open_nursery() as nursery:
            for _ in range(AT_A_TIME):
                nursery.start_soon(self._bring_in_turn, job, waiting)
        bad = [brought for brought in job.brought if brought.status not in GOOD]
        log.info(
            "preloaded",
            paths=[os.fsdecode(path) for path in paths],
            files=len(job.files) - len(bad),
            bytes=sum(b.size for b in job.brought if b.status in GOOD),
            not_brought={brought.path: brought.status for brought in bad[:10]},
        )

    async def _bring_in_turn(self, job: Job, waiting: Iterator[Found]) -> None:
        for found in waiting:
            job.coming.add(found.ino)
            status = await self._bring(found)
            job.coming.discard(found.ino)
            job.brought.append(PreloadedFile(os.fsdecode(found.path), found.size, status))

    async def _bring(self, found: Found) -> str:
        try:
            status, digest = await self._steps.drive(self._preloading.bring(found.ino))
        except OSError as error:
            return f"failed: {error.strerror or error}"
        if status == "unknown":
            with self._steps.lock:
                recorded = self._manifest.digest(tuple(found.path.split(b"/")))
            if recorded:
                return "verified" if recorded == digest else "differs"
        return status
