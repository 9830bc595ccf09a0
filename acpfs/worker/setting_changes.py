"""What `acpfs-ctl set` does: each setting that can be changed in use, and how a running mount takes
it up.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import trio

from acpfs.config import WhenFull
from acpfs.errors import AcpfsError, ConfigError
from acpfs.filesystem.steps import settled
from acpfs.ram import place as places
from acpfs.ram.memory import budget_bytes, read_memory
from acpfs.worker import logs
from acpfs.worker.assembly import Parts

SPILL_ANSWERS_S = 10.0


def _change_ram(parts: Parts, wanted: int | str) -> None:
    budget = budget_bytes(wanted, read_memory())
    with parts.fs.lock:
        with parts.state.step():  # tier files end with it
            parts.tier.look_full()
            places.resize(parts.place, max(budget, parts.tier.budget_bytes))
            parts.tier.change_budget(budget)
        places.resize(parts.place, budget)  # after what may leave has left


def _change_keep(parts: Parts, wanted: int) -> None:
    with parts.fs.lock, parts.state.step():
        parts.inner.eviction.keep(wanted)


def _change_when_full(parts: Parts, wanted: WhenFull) -> None:
    with parts.fs.lock:
        parts.fs.change_when_full(wanted)


def _change_spill_budget(parts: Parts, wanted: int | str) -> Future[None]:
    spill = parts.inner.spill
    if spill is None or parts.settings.spill is None:
        raise ConfigError("spill_budget cannot be changed: this mount has no spill directory")
    return spill.calls.submit("budget", spill.set_budget, wanted)


def _change_reserve(parts: Parts, wanted: int | str) -> None:
    with parts.fs.lock, parts.state.step():
        parts.tier.keep_for_urgent(wanted)


def _change_share(parts: Parts, wanted: int | str) -> None:
    with parts.fs.lock, parts.state.step():
        parts.inner.charges.change(wanted)
        parts.tier.room_changed()


async def answered(asked: Future[None]) -> None:
    """What a change had to ask the spill disk, which may hang."""
    with trio.move_on_after(SPILL_ANSWERS_S):
        await settled(asked)
    if not asked.done():
        raise AcpfsError("the spill directory does not answer: ask again when it does")
    if error := asked.exception():
        raise AcpfsError(f"the spill directory refuses: {error}") from error


CHANGES: dict[str, Callable[[Parts, Any], Future[None] | None]] = {
    "bandwidth": lambda parts, wanted: parts.engine.set_bandwidth(wanted),
    "streams": lambda parts, wanted: parts.engine.set_streams(wanted),
    "log_level": lambda _parts, wanted: logs.set_level(wanted),
    "ram": _change_ram,
    "keep_checkpoints": _change_keep,
    "when_full": _change_when_full,
    "spill_budget": _change_spill_budget,
    "ram_per_user": _change_share,
    "reserve": _change_reserve,
    "wait_for_peers_s": lambda _parts, _wanted: None,
}
