"""Makes a fixture: what this checkout leaves when all of acpfs is killed before anything drained.

    python -m tests.formats.leave NAME [CODE [CASE...]]    as root; to tests/formats/fixtures/NAME

To be called at the tag of each release; `test_left.py` reads what it wrote with the code of every
later one. `CODE`: a directory with the package of another version, in place of this checkout's. Two
cases: `tier`, a RAM tier that is found again, and `mirror`, a mirror's journal and copies after a
reboot. `members` is what other nodes read of it: its record, in each way in which a mount ends. All
of it is text, and small.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import sqlite3
import stat
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

from tests.rig.mounts import REPOSITORY, AcpfsMount
from tests.supervisor.test_spill import is_mirrored

FIXTURES = Path(__file__).with_name("fixtures")
CASES = ("tier", "mirror")
NODE = "left"
MIRROR = {"spill_mode": "mirror"}
HELD_BYTES = 256 << 10
"""Of the first file, which drains at a byte a second: nothing behind it does."""
HELD = "held"
OWN = ".acpfs"
MEMBERS = "members"
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
SCRATCH = "@SCRATCH@"
"""In place of the directory in which all of it lay."""
Shown = dict[str, dict[str, Any]]


def save(top: Path) -> int:
    """A run's files, and every kind of operation; a descriptor that stays open."""
    (top / HELD).write_bytes(bytes(HELD_BYTES))
    for step in (1, 2):
        directory = top / f"run/step-{step}"
        directory.mkdir(parents=True)
        (directory / "model.pt").write_bytes(b"model %d" % step)
        (directory / "more").mkdir()
        (directory / "more/optim.pt").write_bytes(b"optim %d" % step)
        (top / "run/latest.tmp").write_text(f"step-{step}")
        (top / "run/latest.tmp").rename(top / "run/latest")
    os.link(top / "run/step-2/model.pt", top / "run/best.pt")
    os.symlink("step-2", top / "run/newest")
    os.mkfifo(top / "run/pipe", 0o640)
    (top / "run/step-1/model.pt").unlink()
    os.setxattr(top / "run/step-2", "user.note", b"kept")
    os.chmod(top / "run/step-2/more/optim.pt", 0o640)
    os.utime(top / "run/step-2/more/optim.pt", ns=(1_700_000_000_000_000_000,) * 2)
    os.rename(top / "run/step-1/more", top / "run/moved")
    with open(top / "run/sparse", "wb") as file:
        file.seek(1 << 20)
        file.write(b"end")
    fd = os.open(top / "run/log", os.O_CREAT | os.O_WRONLY, 0o600)
    os.write(fd, b"a line\n")
    os.fsync(fd)
    return fd


def shown(top: Path) -> Shown:
    """Everything below a directory, as programs see it."""
    found: Shown = {}
    for path in sorted(top.rglob("*")):
        if OWN in path.relative_to(top).parts:
            continue
        st = path.lstat()
        entry: dict[str, Any] = {"mode": st.st_mode}
        if stat.S_ISREG(st.st_mode):
            content = path.read_bytes()
            entry |= {"size": st.st_size, "mtime_ns": st.st_mtime_ns, "nlink": st.st_nlink}
            entry["content"] = content.lstrip(b"\0").decode()
        elif stat.S_ISLNK(st.st_mode):
            entry["target"] = os.readlink(path)
        elif stat.S_ISDIR(st.st_mode):
            entry["xattrs"] = {name: str(os.getxattr(path, name)) for name in os.listxattr(path)}
        found[path.relative_to(top).as_posix()] = entry
    return found


def options(case: str, spill: Path) -> dict[str, Any]:
    """Of the mount that leaves it, and of the one that finds it."""
    return {
        "node_id": NODE,
        "ram": "64M",
        **({"spill": spill, **MIRROR} if case == "mirror" else {}),
    }


def dump(database: Path) -> str:
    """A database as statements, its version too."""
    with contextlib.closing(sqlite3.connect(database)) as db:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        return "\n".join([f"PRAGMA user_version={version};", *db.iterdump()]) + "\n"


def _names_places(name: str) -> bool:
    """Whether a file says where the mount was. (A member's record does, and has a checksum.)"""
    return name.endswith("meta.json") or "/mirrors/" in name


def keep(source: Path, target: Path, scratch: Path) -> None:
    """A directory as text: databases as statements, files packed, `scratch` as a word."""
    target.mkdir(parents=True)
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source).as_posix()
        if path.suffix == ".sqlite":
            statements = dump(path).replace(str(scratch), SCRATCH)
            (target / f"{path.stem}.sql").write_text(statements)
            files[name] = {"statements": f"{path.stem}.sql"}
        elif path.is_dir():
            files[name] = {"mode": stat.S_IMODE(path.stat().st_mode)}
        elif path.is_file() and _names_places(name):
            files[name] = {"text": path.read_text().replace(str(scratch), SCRATCH)}
        elif path.is_file() and ".sqlite-" not in name:
            packed = zlib.compress(path.read_bytes(), 9)
            files[name] = {"content": base64.b64encode(packed).decode()}
    (target / "files.json").write_text(json.dumps(files, indent=1) + "\n")


def lay(source: Path, target: Path, scratch: Path) -> None:
    """Inverse of `keep`, where the mount's places are below `scratch`."""
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, kept in json.loads((source / "files.json").read_text()).items():
        path = target / name
        if "mode" in kept:
            path.mkdir(exist_ok=True)
            path.chmod(kept["mode"])
        elif "statements" in kept:
            statements = (source / kept["statements"]).read_text().replace(SCRATCH, str(scratch))
            with contextlib.closing(sqlite3.connect(path)) as db:
                db.executescript(statements)
            path.chmod(0o600)
        elif "text" in kept:
            path.write_text(kept["text"].replace(SCRATCH, str(scratch)))
        else:
            path.write_bytes(zlib.decompress(base64.b64decode(kept["content"])))
            path.chmod(0o600)


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
        (target / "shown.json").write_text(json.dumps(seen, indent=1, sort_keys=True) + "\n")
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
        (mount.path / HELD).write_bytes(bytes(HELD_BYTES))
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


def main(name: str, code: Path = REPOSITORY, *only: str) -> None:
    """All cases, or some."""
    for case in only or (*CASES, MEMBERS):
        target = FIXTURES / name / case
        shutil.rmtree(target, ignore_errors=True)
        if case == MEMBERS:
            records(target, code)
            continue
        with tempfile.TemporaryDirectory() as scratch:
            make(case, target, Path(scratch), code)


if __name__ == "__main__":
    name_, *further = sys.argv[1:]
    main(name_, Path(further[0]) if further else REPOSITORY, *further[1:])
