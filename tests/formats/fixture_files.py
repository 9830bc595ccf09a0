"""What fixtures are made of and how they are read: a run's files, what programs see of them, and
directories as text. `leave.py` and `leave_held.py` make them, tests lay them out again.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import sqlite3
import stat
import zlib
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).with_name("fixtures")
NODE = "left"
HELD_BYTES = 256 << 10
"""Of the first file, which drains at a byte a second: nothing behind it does."""
FIRST = "held"
OWN = ".acpfs"
RUN_FILES = ("mounts/", "remembered/")
"""Of a run directory."""
SCRATCH = "@SCRATCH@"
"""In place of the directory in which all of it lay."""
Shown = dict[str, dict[str, Any]]


def save(top: Path) -> int:
    """A run's files, and every kind of operation; a descriptor that stays open."""
    (top / FIRST).write_bytes(bytes(HELD_BYTES))
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


def dump(database: Path) -> str:
    """A database as statements, its version too."""
    with contextlib.closing(sqlite3.connect(database)) as db:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        return "\n".join([f"PRAGMA user_version={version};", *db.iterdump()]) + "\n"


def _names_places(name: str) -> bool:
    """Whether a file says where the mount was. (A member's record does, and has a checksum.)"""
    return name.endswith("meta.json") or "/mirrors/" in name or name.startswith(RUN_FILES)


def _xattrs(path: Path) -> dict[str, str]:
    """Those of acpfs, which are text."""
    names = [name for name in os.listxattr(path) if name.startswith("user.acpfs.")]
    return {name: os.getxattr(path, name).decode() for name in names}


def keep_shown(seen: Shown, target: Path) -> None:
    """What programs saw of a fixture."""
    (target / "shown.json").write_text(json.dumps(seen, indent=1, sort_keys=True) + "\n")


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
        if name in files and (noted := _xattrs(path)):
            files[name] |= {"xattrs": noted, "mtime_ns": path.stat().st_mtime_ns}
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
        for attribute, value in kept.get("xattrs", {}).items():
            os.setxattr(path, attribute, value.encode())
        if "mtime_ns" in kept:  # the note of a checksum says of which time it is
            os.utime(path, ns=(kept["mtime_ns"],) * 2)
