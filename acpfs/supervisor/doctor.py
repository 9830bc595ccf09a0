"""Examines a machine for `acpfs doctor`: one finding per subject, with what it costs or what to do.

Changes nothing but for a short-lived probe in a backing directory that was named, and looks at that from a thread that may hang.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from acpfs.backing.directory import BackingDirectory
from acpfs.backing.probe import ProbeReport, probe
from acpfs.errors import AcpfsError
from acpfs.ram.memory import budget_bytes, read_memory
from acpfs.ram.mounts import mount_tmpfs, unmount
from acpfs.ram.place import HUGE_CHOICES
from acpfs.supervisor.checks import BACKING_WAIT_S, check_backing, check_fuse, within

PASSTHROUGH_KERNEL = (6, 9)
FUSE_SYSCTLS = Path("/proc/sys/fs/fuse")
PROBE_NODE = "doctor"
DEFAULT_SHARE = "25%"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line; verdict: ok, note (works, with a cost) or bad (a mount would fail)."""

    subject: str
    verdict: str
    text: str


def examine(backing: Path | None) -> list[Finding]:
    """All findings; a subject whose examination fails is a bad one."""
    subjects: list[tuple[str, Callable[[], list[Finding]]]] = [
        ("kernel", _kernel),
        ("fuse", _fuse),
        ("request timeout", _request_timeout),
        ("memory", _memory),
        ("huge pages", _huge_pages),
        ("mount helper", _system_mount),
    ]
    if backing is not None:
        subjects.append(("backing directory", lambda: _backing(backing)))
    findings: list[Finding] = []
    for subject, look in subjects:
        try:
            findings += look()
        except (AcpfsError, OSError) as error:
            findings.append(Finding(subject, "bad", str(error)))
    return findings


def _kernel() -> list[Finding]:
    release = platform.release()
    numbers = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in release.split(".")[:2])
    if numbers >= PASSTHROUGH_KERNEL:
        return [Finding("kernel", "ok", f"{release}: has FUSE passthrough, if it is built in")]
    return [Finding("kernel", "note", f"{release}: no FUSE passthrough (since 6.9), file bytes travel through the daemon")]


def _fuse() -> list[Finding]:
    check_fuse()
    how = "as root" if os.getuid() == 0 else f"through {shutil.which('fusermount3')}"
    return [Finding("fuse", "ok", f"/dev/fuse is there, mounting {how}")]


def _request_timeout() -> list[Finding]:
    """Linux 6.15 can abort a mount whose requests take too long; a full RAM tier makes writers wait."""
    try:
        limit_s = int((FUSE_SYSCTLS / "max_request_timeout").read_text())
    except (OSError, ValueError):
        return []
    if limit_s == 0:
        return [Finding("request timeout", "ok", "the kernel never gives a request up")]
    text = f"fs.fuse.max_request_timeout = {limit_s} s: the kernel aborts the mount when a writer waits longer for room; set it to 0"
    return [Finding("request timeout", "note", text)]


def _memory() -> list[Finding]:
    memory = read_memory()
    gib = 1 << 30
    text = f"{memory.machine_bytes / gib:.1f} GiB"
    if memory.cgroup_bytes is not None:
        text += f", the control group {memory.cgroup} allows {memory.cgroup_bytes / gib:.1f} GiB"
    return [
        Finding("memory", "ok", f"{text}; the RAM tier would get {budget_bytes(DEFAULT_SHARE, memory) / gib:.1f} GiB ({DEFAULT_SHARE})")
    ]


def _huge_pages() -> list[Finding]:
    with tempfile.TemporaryDirectory(prefix="acpfs-doctor-") as name:
        for huge in filter(None, HUGE_CHOICES):
            try:
                mount_tmpfs(Path(name), f"size=4M,mode=0700,huge={huge}")
            except OSError as error:
                if isinstance(error, PermissionError):
                    return [
                        Finding("huge pages", "note", "this user may not mount a tmpfs: the RAM tier lies in /dev/shm, about half as fast")
                    ]
                continue
            unmount(name, detach=True)
            return [Finding("huge pages", "ok", f"tmpfs takes huge={huge}")]
    return [Finding("huge pages", "note", "this kernel's tmpfs has no huge pages: the mount is about half as fast")]


def _system_mount() -> list[Finding]:
    for directory in ("/sbin", "/usr/sbin"):
        if (Path(directory) / "mount.acpfs").exists():
            return [Finding("mount helper", "ok", f"{directory}/mount.acpfs: `mount -t acpfs` and fstab work")]
    own = shutil.which("mount.acpfs") or "…/bin/mount.acpfs"
    return [Finding("mount helper", "note", f"for `mount -t acpfs` and fstab: ln -s {own} /sbin/mount.acpfs")]


def _tidy(own: Path) -> None:
    """Leave no trace in a directory that was never mounted; what is not empty belongs to mounts."""
    for name in (f"staging/{PROBE_NODE}", "staging", "manifest", "nodes", ""):
        with contextlib.suppress(OSError):
            (own / name).rmdir()


def _backing(backing: Path) -> list[Finding]:
    reports: list[ProbeReport] = []

    def look() -> None:
        check_backing(backing)
        directory = BackingDirectory(backing, PROBE_NODE)
        try:
            reports.append(probe(directory))
        finally:
            directory.disconnect()
            _tidy(backing / ".acpfs")

    within(BACKING_WAIT_S, f"backing directory {backing} does not answer", look)
    notes = [Finding("backing directory", "note", note) for note in reports[0].notes]
    return notes or [Finding("backing directory", "ok", f"{backing} has everything that acpfs can use")]
