"""`acpfs-ctl doctor` in the worker: walks over the invariants, in pieces, beside whatever goes
on.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from threading import RLock

import trio

from acpfs.control.reports import Fault
from acpfs.filesystem.invariants import PIECE_S, Invariants, Place
from acpfs.logger import get_logger

FAULTS_MAX = 1000
"""Then no more are looked for."""
LOOK_AGAIN_S = 1.0
"""A call may be half-way through: what is wrong only for a moment is none."""

log = get_logger(__name__)


async def examine(
    lock: RLock, invariants: Invariants, tell: Callable[[int], Awaitable[None]]
) -> list[Fault]:
    """What is wrong, and still is a moment later."""
    suspects = await _suspects(lock, invariants, tell)
    if not suspects:
        return []
    await trio.sleep(LOOK_AGAIN_S)
    with lock:
        found = [violation for place in suspects for violation in invariants.wrong(place)]
    faults = [Fault(os.fsdecode(violation.path), violation.text) for violation in found]
    if faults:
        log.error(
            "doctor: this must never be so",
            path=faults[0].path,
            fault=faults[0].fault,
            faults=len(faults),
        )
    return faults


async def _suspects(
    lock: RLock, invariants: Invariants, tell: Callable[[int], Awaitable[None]]
) -> list[Place]:
    found = list[Place]()
    pieces = invariants.pieces()
    count = 0
    while len(found) < FAULTS_MAX:
        with lock:
            piece = next(pieces, None)
        if piece is None:
            break
        found += piece
        count += 1
        await tell(count)
        await trio.sleep(PIECE_S)  # half of the time is everybody else's
    return found[:FAULTS_MAX]
