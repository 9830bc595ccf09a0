"""`acpfs-ctl doctor` in the worker: walks over the invariants, in pieces, beside whatever goes on."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

import trio

from acpfs.control.reports import Fault
from acpfs.filesystem.filesystem import FileSystem
from acpfs.filesystem.invariants import PIECE_S, Place
from acpfs.logger import get_logger

FAULTS_MAX = 1000
"""Then no more are looked for."""
LOOK_AGAIN_S = 1.0
"""A call may be half-way through: what is wrong only for a moment is none."""

log = get_logger(__name__)


async def examine(fs: FileSystem, tell: Callable[[int], Awaitable[None]]) -> list[Fault]:
    """What is wrong, and still is a moment later."""
    suspects = await _suspects(fs, tell)
    if not suspects:
        return []
    await trio.sleep(LOOK_AGAIN_S)
    with fs.lock:
        found = [violation for place in suspects for violation in fs.invariants.wrong(place)]
    faults = [Fault(os.fsdecode(violation.path), violation.text) for violation in found]
    if faults:
        log.error("doctor: this must never be so", path=faults[0].path, fault=faults[0].fault, faults=len(faults))
    return faults


async def _suspects(fs: FileSystem, tell: Callable[[int], Awaitable[None]]) -> list[Place]:
    found, pieces, count = list[Place](), fs.invariants.pieces(), 0
    while len(found) < FAULTS_MAX:
        with fs.lock:
            piece = next(pieces, None)
        if piece is None:
            break
        found += piece
        count += 1
        await tell(count)
        await trio.sleep(PIECE_S)  # half of the time is everybody else's
    return found[:FAULTS_MAX]
