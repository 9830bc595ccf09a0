"""Fault points: the numbered steps of the write-back engine at which a worker can be made to die,
before or after.

Nothing of this is in the product: `inject/sitecustomize.py` calls `install` in processes that find
ACPFS_DRILL in their environment, and then the methods named here are wrapped. A worker dies at the
point, and at the pass, that the file `next` in the directory ACPFS_DRILL names; the file becomes
`fired`, so that the next worker lives. Numbers are positions in POINTS: only append.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "ACPFS_DRILL"
BEFORE = "before"
AFTER = "after"


@dataclass(frozen=True)
class Step:
    """One step: its name, and the method that carries it out."""

    name: str
    module: str
    owner: str
    method: str


_LOWER = ("acpfs.backing.directory", "BackingDirectory")
_LOG = ("acpfs.writeback.log.log", "OperationLog")
_SPILLED = ("acpfs.ram.spill_directory", "SpillDirectory")
_SPILL = ("acpfs.writeback.sources.spill", "Spill")
_MIRROR = ("acpfs.writeback.sources.mirror", "Mirror")
_SALVAGE = ("acpfs.filesystem.salvage", "_Salvage")
STEPS = (
    Step("staging: create", *_LOWER, "create_staging"),
    Step("staging: write", *_LOWER, "write"),
    Step("staging: truncate", *_LOWER, "truncate"),
    Step("staging: attributes", *_LOWER, "apply_fd"),
    Step("staging: fsync", *_LOWER, "sync"),
    Step("staging: close", *_LOWER, "close"),
    Step("staging: remove", *_LOWER, "remove_staging"),
    Step("commit: rename", *_LOWER, "rename"),
    Step("commit: exchange", *_LOWER, "exchange"),
    Step("commit: mkdir", *_LOWER, "mkdir"),
    Step("commit: rmdir", *_LOWER, "rmdir"),
    Step("commit: unlink", *_LOWER, "unlink"),
    Step("commit: link", *_LOWER, "link"),
    Step("commit: symlink", *_LOWER, "symlink"),
    Step("commit: attributes", *_LOWER, "apply"),
    Step("flush: directory times", *_LOWER, "set_times"),
    Step("flush: directory fsync", *_LOWER, "sync_directory"),
    Step("flush: entry fsync", *_LOWER, "sync_entry"),
    Step("manifest: write", *_LOWER, "_write_own"),
    Step("manifest: directory fsync", *_LOWER, "_sync_own"),
    Step("log: append", *_LOG, "append"),
    Step("log: fold attributes", *_LOG, "fold"),
    Step("log: version saved", *_LOG, "save_version"),
    Step("log: operation begun", *_LOG, "mark_begun"),
    Step("log: operation committed", *_LOG, "mark_committed"),
    Step("log: operation removed", *_LOG, "remove"),
    Step("log: operations left out", *_LOG, "leave_out"),
    Step("state: commit", "acpfs.ram.state", "StateDatabase", "commit"),
    Step("tier: create", "acpfs.ram.tier", "Tier", "create"),
    Step("tier: copy", "acpfs.ram.tier", "Tier", "copy"),
    Step("tier: remove", "acpfs.ram.tier", "Tier", "remove"),
    Step("manifest: entry", "acpfs.writeback.manifest.manifest", "Manifest", "put"),
    Step("tier: unlink", "acpfs.ram.tier", "Tier", "_unlink"),
    Step("spill: create", *_SPILLED, "create"),
    Step("spill: copy", *_SPILL, "_fill"),
    Step("spill: flush", *_SPILLED, "sync_names"),
    Step("spill: row", *_SPILL, "_keep"),
    Step("spill: RAM freed", "acpfs.filesystem.content.spilling", "Spilling", "_leave_ram"),
    Step("spill: back to RAM", *_SPILL, "_copy_back"),
    Step("spill: copy forgotten", *_SPILL, "forget"),
    Step("spill: remove", *_SPILLED, "remove"),
    Step("mirror: journal begun", *_MIRROR, "_seed"),
    Step("mirror: journal commit", *_MIRROR, "_apply"),
    Step("mirror: mark", *_MIRROR, "_set_mark"),
    Step("mirror: mark withdrawn", *_MIRROR, "_remove_mark"),
    Step("mirror: ahead of a commit", *_MIRROR, "_ahead_of"),
    Step("salvage: log cut", *_SALVAGE, "_cut"),
    Step("salvage: tree made", *_SALVAGE, "_name"),
    Step("salvage: whole", *_SALVAGE, "run"),
    Step("recover: state opened", "acpfs.ram.state", "StateDatabase", "__init__"),
    Step("guard: deletion set aside", *_LOG, "set_aside"),
    Step("guard: deletion let go", *_LOG, "let_go"),
    Step("guard: directory moved aside", *_LOG, "turn_into_rename"),
    Step("guard: deletion back in the order", *_LOG, "bring_back"),
    Step("areas: staged elsewhere", "acpfs.writeback.commits.placing", "Placing", "_stage_as"),
)
POINTS = tuple((step, side) for step in STEPS for side in (BEFORE, AFTER))


def numbers(*families: str) -> list[int]:
    """Points of the families of steps, by what their names begin with: those of the spill tier are
    passed only where there is one.
    """
    return [
        number
        for number, (step, _side) in enumerate(POINTS)
        if step.name.partition(":")[0] in families
    ]


SPILL_POINTS = numbers("spill")
MIRROR_POINTS = numbers("mirror")
SALVAGE_POINTS = numbers("salvage", "recover")
GUARD_POINTS = numbers("guard")
AREA_POINTS = numbers("areas")
"""Passed where something was staged on another file system than that of its place."""
PLAIN_POINTS = sorted(
    {*range(len(POINTS))}
    - {*SPILL_POINTS, *MIRROR_POINTS, *SALVAGE_POINTS, *GUARD_POINTS, *AREA_POINTS}
)


def label(number: int) -> str:
    """A point in words."""
    step, side = POINTS[number]
    return f"{number:02d} {side} {step.name}"


class Charges:
    """Lies in wait for the point and the pass that are ordered; one per process, all threads."""

    def __init__(self, directory: Path) -> None:
        self._next = directory / "next"
        self._fired = directory / "fired"
        self._lock = threading.Lock()
        self._point = -1
        self._left = 0

    def passing(self, number: int) -> None:
        """Called at each pass of each point; may not return."""
        if self._point < 0 and not self._next.exists():
            return
        with self._lock:
            if self._point < 0:
                self._arm()
            if self._point == number:
                self._left -= 1
                if self._left <= 0:
                    self._fire()

    def _arm(self) -> None:
        try:
            self._point, self._left = json.loads(self._next.read_text())
        except (FileNotFoundError, ValueError):
            return

    def _fire(self) -> None:
        try:
            self._next.rename(self._fired)
        except FileNotFoundError:
            self._point = -1  # withdrawn meanwhile
            return
        os.kill(os.getpid(), signal.SIGKILL)


def _wrapped(function: Callable[..., Any], number: int, charges: Charges) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **words: Any) -> Any:
        charges.passing(number)
        answer = function(*arguments, **words)
        charges.passing(number + 1)
        return answer

    return call


def install() -> None:
    """Wrap every step's method; a method that is not there any more is an error, not a point
    less.
    """
    charges = Charges(Path(os.environ[VARIABLE]))
    for number, step in enumerate(STEPS):
        owner = getattr(importlib.import_module(step.module), step.owner)
        wrapped: Any = _wrapped(getattr(owner, step.method), 2 * number, charges)
        is_static = isinstance(inspect.getattr_static(owner, step.method), staticmethod)
        setattr(owner, step.method, staticmethod(wrapped) if is_static else wrapped)
