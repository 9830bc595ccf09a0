"""Fixtures of what one member has of another one: the copies that a holder keeps in its RAM tier,
and the journal that lies on the storage while the holder is out of reach. `leave.py` calls it.

Real mounts of the version that leaves them, over a storage that takes nothing of the one whose
machine is lost; but its first file, for a journal on the storage, which is told what is done.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from tests.cluster.stand import QUICK
from tests.formats.fixture_files import NODE, keep, keep_shown, save, shown
from tests.rig.faultfs import FaultFs
from tests.rig.mounts import AcpfsMount
from tests.rig.processes import stop_processes

HOLDS = "holds"
HELD = "held"
JOURNAL = "journal"
STAGING = f".acpfs/staging/{NODE}"


def options(node: str) -> dict[str, Any]:
    """Of both mounts that leave it, and of the one that finds it."""
    return {
        **QUICK,
        "node_id": node,
        "exchange": "127.0.0.1",
        "copies": 1,
        "failure_domain": f"rack-of-{node}",
    }


def is_copied(status: dict[str, Any]) -> bool:
    """Whether the holder has all."""
    copies = status["copies"]
    return bool(copies["state"] == "on" and not (copies["behind_files"] or copies["pending"]))


def held(target: Path, scratch: Path, code: Path) -> None:
    """The holder has all."""
    _make(HELD, target, scratch, code)


def journal(target: Path, scratch: Path, code: Path) -> None:
    """The journal is on the storage, and the bytes are at the holder."""
    _make(JOURNAL, target, scratch, code)


def _make(case: str, target: Path, scratch: Path, code: Path) -> None:
    with FaultFs(scratch / "backing", scratch / "seen") as storage, contextlib.ExitStack() as stack:
        left, holds = (
            stack.enter_context(
                AcpfsMount(
                    storage.path,
                    scratch / name,
                    "native",
                    environment={"PYTHONPATH": str(code)},
                    **options(name),
                )
            )
            for name in (NODE, HOLDS)
        )
        for mount in (left, holds):
            mount.wait_status(lambda status: status["copies"]["state"] == "on")
        first = storage.fail("ETIMEDOUT", ["fsync"], glob=f"{STAGING}/1-*")
        for others in ("[2-9]", "1[0-9]"):
            storage.fail("ETIMEDOUT", ["fsync"], glob=f"{STAGING}/{others}*")
        fd = save(left.path)
        left.wait_status(is_copied)
        if case == JOURNAL:
            stop_processes(holds.living())
            storage.clear(first)
            left.wait_status(lambda status: status["copies"]["state"] == "away")
        seen = shown(left.path)
        left.kill()
        with contextlib.suppress(OSError):  # the mount is dead
            os.close(fd)
        holds.kill()
        (tier,) = (path for path in (holds.runtime_dir / "tiers").iterdir() if path.is_dir())
        keep(scratch / "backing", target / "backing", scratch)
        keep(tier, target / "tier", scratch)
        keep_shown(seen, target)
        print(f"{case}: {len(seen)} names")
