"""Makes fixtures: what this checkout leaves for later versions, small and as text.

    python -m tests.formats.leave NAME [CODE [CASE...]]    as root; to tests/formats/fixtures/NAME

To be called at the tag of each release; `test_left.py` and `test_left_records.py` read what it
wrote with the code of every later one. `CODE`: a directory with the package of another version, in
place of this checkout's.

`tier`, `mirror`: all of acpfs is killed before anything drained; a RAM tier that is found again,
and a mirror's journal and copies after a reboot. `members`: what other nodes read of it, in each
way in which a mount ends. `held`, `journal`: what another member has of it (`leave_held.py`).
`stored`: what lies on the storage, and in the run directory, of a mount that ended in order.
`words`: records of processes, and of a job (`leave_words.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from tests.formats import leave_held, leave_words
from tests.formats.fixture_files import (
    FIRST,
    FIXTURES,
    HELD_BYTES,
    NODE,
    keep,
    keep_shown,
    save,
    shown,
)
from tests.rig.mounts import REPOSITORY, AcpfsMount
from tests.supervisor.test_spill import is_mirrored

CASES = ("tier", "mirror")
MIRROR = {"spill_mode": "mirror"}
MEMBERS = "members"
STORED = "stored"
WORDS = "words"
ALL = (*CASES, MEMBERS, leave_held.HELD, leave_held.JOURNAL, STORED, WORDS)
ENDS = ("live", "away", "left")
"""What the record of a mount says that was killed, unmounted with something left, and in order."""
OF_THE_MACHINE = {
    "host": "elsewhere",
    "hardware": "",
    "boot_id": "0" * 32,
    "mountpoint": "/mnt/left",
    "lock": "",
}
"""In place of what a record says of the machine where it was made."""
NOT_KEPT = ("logs", "tls")
"""Of a job's directory: what nobody reads, and keys."""


def options(case: str, spill: Path) -> dict[str, Any]:
    """Of the mount that leaves it, and of the one that finds it."""
    return {
        "node_id": NODE,
        "ram": "64M",
        **({"spill": spill, **MIRROR} if case == "mirror" else {}),
    }


def make(case: str, target: Path, scratch: Path, code: Path) -> None:
    """One fixture."""
    backing = scratch / "backing"
    spill = scratch / "spill"
    for directory in (backing, spill):
        directory.mkdir()
    with AcpfsMount(
        backing,
        scratch / "mnt",
        "native",
        environment={"PYTHONPATH": str(code)},
        bandwidth="1",
        **options(case, spill),
    ) as mount:
        fd = save(mount.path)
        seen = shown(mount.path)
        if case == "mirror":
            mount.wait_status(is_mirrored)
        mount.kill()
        with contextlib.suppress(OSError):  # the mount is dead
            os.close(fd)
        (tier,) = (path for path in (mount.runtime_dir / "tiers").iterdir() if path.is_dir())
        keep(backing, target / "backing", scratch)
        if case == "mirror":
            (copies,) = spill.glob(f"acpfs-*-{NODE}")
            keep(copies, target / "spill", scratch)
        else:
            keep(tier, target / "tier", scratch)
        keep_shown(seen, target)
        print(f"{case}: {len(seen)} names")


def record_of(end: str, scratch: Path, code: Path) -> dict[str, Any]:
    """What a mount's record says after it has ended so."""
    (scratch / "backing").mkdir()
    settings = options("tier", scratch) | ({} if end == "left" else {"bandwidth": "1"})
    with AcpfsMount(
        scratch / "backing",
        scratch / "mnt",
        "native",
        environment={"PYTHONPATH": str(code)},
        **settings,
    ) as mount:
        (mount.path / FIRST).write_bytes(bytes(HELD_BYTES))
        (mount.path / "latest").write_text("1")
        if end == "live":
            mount.kill()
        elif end == "away":
            mount.run("acpfs", "umount", "--leave", "--timeout", "0", str(mount.path))
        else:
            mount.umount()
    record: dict[str, Any] = json.loads((scratch / "backing/.acpfs/nodes" / NODE).read_bytes())
    del record["sum"]
    assert record["state"] == end
    return record | {key: value for key, value in OF_THE_MACHINE.items() if key in record}


def records(target: Path, code: Path) -> None:
    """What other nodes read, one record for each way to end."""
    found = {}
    for end in ENDS:
        with tempfile.TemporaryDirectory() as scratch:
            found[end] = record_of(end, Path(scratch), code)
    target.mkdir(parents=True)
    (target / "records.json").write_text(json.dumps(found, indent=1) + "\n")


def stored(target: Path, scratch: Path, code: Path) -> None:
    """What is there when all has drained: in a second term, with both xattrs of acpfs."""
    backing = scratch / "backing"
    backing.mkdir()
    environment = {"PYTHONPATH": str(code)}
    with AcpfsMount(
        backing, scratch / "mnt", "native", environment=environment, **options("tier", scratch)
    ) as mount:
        (mount.path / "run").mkdir()
        os.setxattr(mount.path / "run", "user.acpfs.fsync", b"durable")
        (mount.path / "run/first.pt").write_bytes(b"first")
        mount.flush()
        shutil.rmtree(backing / f".acpfs/staging/{NODE}")  # another term begins (S554)
        (mount.path / "run/second.pt").write_bytes(b"second" * 100)
        mount.flush()
        runtime = mount.runtime_dir
        shutil.copytree(runtime / "mounts", scratch / "run/mounts")
        mount.umount()
        shutil.copytree(runtime / "remembered", scratch / "run/remembered")
    keep(backing, target / "backing", scratch)
    keep(scratch / "run", target / "run", scratch)


def words(target: Path, scratch: Path, code: Path) -> None:
    """Records that a process of that version writes by itself."""
    environment = {**os.environ, "PYTHONPATH": str(code)}
    script = [sys.executable, leave_words.__file__, str(scratch)]
    subprocess.run(script, check=True, env=environment, timeout=300)
    for path in [path for name in NOT_KEPT for path in scratch.rglob(name)]:
        shutil.rmtree(path)
    keep(scratch, target, scratch)


def main(name: str, code: Path = REPOSITORY, *only: str) -> None:
    """All cases, or some."""
    for case in only or ALL:
        target = FIXTURES / name / case
        shutil.rmtree(target, ignore_errors=True)
        if case == MEMBERS:
            records(target, code)
            continue
        with tempfile.TemporaryDirectory() as scratch:
            makers = {
                STORED: stored,
                WORDS: words,
                leave_held.HELD: leave_held.held,
                leave_held.JOURNAL: leave_held.journal,
            }
            make_it = makers.get(case, partial(make, case))
            make_it(target, Path(scratch), code)


if __name__ == "__main__":
    name_, *further = sys.argv[1:]
    main(name_, Path(further[0]) if further else REPOSITORY, *further[1:])
