"""Examines a machine for `acpfs doctor`: one finding per subject, with what it costs or what to do.

Changes nothing but for a short-lived probe in a backing directory that was named, and looks at that
from a thread that may hang. What the kernel's FUSE can do is not guessed from its version: a
session is begun on a mount point in a temporary directory, and ended.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from acpfs.backing.directory import BackingDirectory
from acpfs.backing.late_calls import LateCalls, Storage, note, storage_at, try_late_calls
from acpfs.backing.probe import ProbeReport, probe
from acpfs.config import Transport
from acpfs.errors import AcpfsError, MachineError
from acpfs.mounting import transports
from acpfs.mounting.checks import (
    BACKING_WAIT_S,
    DEV_FUSE,
    apart,
    check_backing,
    check_fuse,
    check_spill,
    within,
)
from acpfs.mounting.spill_place import complaints
from acpfs.ram.memory import budget_bytes, headroom_bytes, read_memory
from acpfs.ram.mounts import LOCAL, kind_at, mount_tmpfs, unmount
from acpfs.ram.place import HUGE_CHOICES, SMALL_PAGES
from acpfs.runtime.real import real_runtime
from acpfs.transport.native.device import Device
from acpfs.transport.native.mount import MountOptions
from acpfs.transport.native.mount import mount as session_mount
from acpfs.transport.native.mount import unmount as session_unmount
from acpfs.transport.native.negotiate import (
    ALL_FEATURES,
    Negotiated,
    ProtocolError,
    max_pages_limit,
)
from acpfs.transport.native.protocol import PAGE_BYTES, InitFlag
from acpfs.transport.native.serve import MASK_VARIABLE
from acpfs.transport.native.session import negotiate
from acpfs.transport.timeouts import RequestTimeouts

SESSION_WAIT_S = 10.0
WRITE_BYTES_ENOUGH = 1 << 20
"""Larger requests gain nothing that could be measured (4 MiB against 1 MiB, direct lane: the same
processor time per GiB).
"""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, never used
SHMEM_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
FUSE_SYSCTLS = Path("/proc/sys/fs/fuse")
PROBE_NODE = "doctor"
FULL_BYTES = 1 << 20
"""Less is full: what acpfs itself needs there, and some files."""
DEFAULT_SHARE = "25%"
THROUGH_DAEMON = "large writes take about 4 times as long"
"""3.4 instead of 24 GB/s (bench/results/native.md)."""
FEATURES = {
    InitFlag.HAS_RESEND: "resending of requests (6.9): calls under way when a worker dies fail",
    InitFlag.DIRECT_IO_ALLOW_MMAP: (
        "mapping of files in the direct lane (6.6): those that may be mapped go through the page "
        "cache"
    ),
    InitFlag.HAS_EXPIRE_ONLY: "expiry of names (6.2)",
    InitFlag.PARALLEL_DIROPS: "parallel lookups (4.7)",
    InitFlag.HANDLE_KILLPRIV_V2: (
        "set-uid removal by the daemon (5.11): each write asks for xattrs first"
    ),
}
"""What the native transport uses if it is there → since when, and what its absence costs."""
OTHER_NAMES = {
    "libfuse3-dev": "fuse3-devel",
    "pkg-config": "pkgconf-pkg-config",
    "python3-dev": "python3-devel",
}
"""Debian's package → Fedora's and its relatives'."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line."""

    subject: str
    """What was looked at."""
    verdict: str
    """ok, note (works, with a cost) or bad (a mount would fail)"""
    text: str
    """In words."""
    fix: tuple[str, ...] = ()
    """Shell commands for root that mend it; they are shown, never run."""


def script(findings: Iterable[Finding]) -> str:
    """A shell script of what `findings` can be mended with, each part below what it is for."""
    parts = [
        "\n".join([f"# {found.subject}: {' '.join(found.text.split())}", *found.fix])
        for found in findings
        if found.fix
    ]
    return "\n\n".join(parts) if parts else "# nothing to mend"


def examine(
    backing: Path | None, spill: Path | None = None, second: Path | None = None
) -> list[Finding]:
    """All findings; a subject whose examination fails is a bad one.

    `second`: another mount of the backing directory's file system, as a second client of it.
    """
    subjects: list[tuple[str, Callable[[], list[Finding]]]] = [
        ("kernel", _kernel),
        ("fuse", _fuse),
        ("transport", _transport),
        ("session", _session),
        ("request timeout", _request_timeout),
        ("memory", _memory),
        ("control group", _control_group),
        ("huge pages", _huge_pages),
        ("shared memory", _shared_memory),
        ("mount helper", _system_mount),
    ]
    if backing is not None:
        subjects.append(("backing directory", lambda: _backing(backing)))
        subjects.append(("late calls", lambda: _late_calls(backing, second)))
    if spill is not None:
        subjects.append(("spill directory", lambda: _spill(spill, backing)))
    findings: list[Finding] = []
    for subject, look in subjects:
        try:
            findings += look()
        except (AcpfsError, OSError) as error:
            findings.append(Finding(subject, "bad", str(error)))
    return findings


def _kernel() -> list[Finding]:
    return [Finding("kernel", "ok", f"Linux {platform.release()}")]


def _transport() -> list[Finding]:
    try:
        chosen = transports.choose(Transport.AUTO)
    except MachineError as error:
        packages = _install("libfuse3-dev", "pkg-config", "gcc", "python3-dev")
        return [
            Finding(
                "transport",
                "bad",
                str(error),
                (packages, f"{shlex.quote(sys.executable)} -m pip install 'acpfs[libfuse]'"),
            )
        ]
    verdict = "ok" if chosen.transport is Transport.NATIVE else "note"
    return [Finding("transport", verdict, f"auto is {chosen.transport.value}: {chosen.reason}")]


def _session() -> list[Finding]:
    """Begin a session of the native transport, as a mount would, and end it."""
    if transports.native_lacks(transports.MachineSupport.this()):
        return []
    found: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="acpfs-doctor-") as name:
        within(
            SESSION_WAIT_S,
            "the kernel does not begin a FUSE session",
            lambda: found.extend(_try_session(Path(name))),
        )
    return found


def _try_session(mountpoint: Path) -> list[Finding]:
    fd = session_mount(mountpoint, MountOptions("acpfs-doctor", allow_other=False))
    device = Device([fd])
    try:
        negotiated = negotiate(fd, int(os.environ.get(MASK_VARIABLE, str(ALL_FEATURES)), 0))
        return [_passthrough(device, negotiated), _requests(negotiated), *_features(negotiated)]
    except ProtocolError as error:
        return [Finding("session", "bad", str(error))]
    finally:
        session_unmount(mountpoint, lazy=True)
        device.close()


def _passthrough(device: Device, negotiated: Negotiated) -> Finding:
    if not negotiated.has(InitFlag.PASSTHROUGH):
        text = (
            "not offered by this kernel (Linux 6.9, CONFIG_FUSE_PASSTHROUGH): bytes go through "
            f"the daemon, and {THROUGH_DAEMON}"
        )
        return Finding("passthrough", "note", text)
    fd = os.memfd_create("acpfs-doctor", os.MFD_CLOEXEC)
    try:
        device.backing_close(device.backing_open(fd))
    except OSError as error:
        text = (
            f"offered by the kernel, but not to this user ({error.strerror}): mount as root, "
            f"else {THROUGH_DAEMON}"
        )
        return Finding("passthrough", "note", text)
    finally:
        os.close(fd)
    return Finding("passthrough", "ok", "the kernel reads and writes files in RAM by itself")


def _requests(negotiated: Negotiated) -> Finding:
    size = negotiated.max_write_bytes
    limit = max_pages_limit()
    text = (
        f"up to {size >> 10} KiB each (fs.fuse.max_pages_limit = {limit}), FUSE "
        f"7.{negotiated.minor}"
    )
    if size < WRITE_BYTES_ENOUGH:
        setting = f"fs.fuse.max_pages_limit={WRITE_BYTES_ENOUGH // PAGE_BYTES}"
        return Finding(
            "requests",
            "note",
            f"{text}: sysctl {setting} makes the direct lane faster",
            _sysctl(setting),
        )
    return Finding("requests", "ok", text)


def _features(negotiated: Negotiated) -> list[Finding]:
    missing = [text for flag, text in FEATURES.items() if not negotiated.has(flag)]
    if missing:
        return [Finding("fuse features", "note", "missing in this kernel: " + "; ".join(missing))]
    return [Finding("fuse features", "ok", "all that are used")]


def _fuse() -> list[Finding]:
    try:
        check_fuse()
    except MachineError as error:
        fix = () if DEV_FUSE.exists() else ("modprobe fuse",)
        if not fix and os.getuid() != 0 and shutil.which(transports.HELPER) is None:
            fix = (_install("fuse3"),)
        return [Finding("fuse", "bad", str(error), fix)]
    how = "as root" if os.getuid() == 0 else f"through {shutil.which('fusermount3')}"
    return [Finding("fuse", "ok", f"/dev/fuse is there, mounting {how}")]


def _request_timeout() -> list[Finding]:
    if not (FUSE_SYSCTLS / "max_request_timeout").exists():
        return []
    native = not transports.native_lacks(transports.MachineSupport.this())
    limits = RequestTimeouts.read(FUSE_SYSCTLS)
    text = limits.warning(asks=native)
    fix = (
        _sysctl(f"fs.fuse.{'max' if limits.max_s else 'default'}_request_timeout=0") if text else ()
    )
    return [
        Finding(
            "request timeout",
            "note" if text else "ok",
            text or "the kernel never gives a request up",
            fix,
        )
    ]


def _memory() -> list[Finding]:
    memory = read_memory()
    gib = 1 << 30
    text = f"{memory.machine_bytes / gib:.1f} GiB"
    if memory.cgroup_bytes is not None:
        text += f", the control group {memory.cgroup} allows {memory.cgroup_bytes / gib:.1f} GiB"
    return [
        Finding(
            "memory",
            "ok",
            f"{text}; the RAM tier would get {budget_bytes(DEFAULT_SHARE, memory) / gib:.1f} GiB "
            f"({DEFAULT_SHARE})",
        )
    ]


def _control_group() -> list[Finding]:
    """Passthrough pages are charged to whoever writes them, so a training container with a tight
    limit pays for its checkpoint.
    """
    room = headroom_bytes()
    if room is None:
        return [Finding("control group", "ok", "no memory limit around this process")]
    text = f"{room / (1 << 30):.1f} GiB of memory left in this process's control group"
    return [
        Finding(
            "control group",
            "note",
            f"{text}: writers in one like it take the slower direct lane unless half of its "
            "limit stays free",
        )
    ]


def _shared_memory() -> list[Finding]:
    """Where the RAM tier lies when no tmpfs may be mounted."""
    space = os.statvfs(SHARED_MEMORY)
    total = space.f_blocks * space.f_frsize / (1 << 30)
    free = space.f_bavail * space.f_frsize / (1 << 30)
    if transports.may_mount():
        return [
            Finding(
                "shared memory",
                "ok",
                f"not needed: the RAM tier has a tmpfs of its own (/dev/shm: {free:.1f} of "
                f"{total:.1f} GiB free)",
            )
        ]
    return [
        Finding(
            "shared memory",
            "note",
            f"the RAM tier lies in /dev/shm, which has {free:.1f} of {total:.1f} GiB free",
        )
    ]


def _huge_pages() -> list[Finding]:
    with tempfile.TemporaryDirectory(prefix="acpfs-doctor-") as name:
        for huge in filter(None, HUGE_CHOICES):
            try:
                mount_tmpfs(Path(name), f"size=4M,mode=0700,huge={huge}")
            except OSError as error:
                if isinstance(error, PermissionError):
                    text = (
                        "this user may not mount a tmpfs: the RAM tier lies in /dev/shm, "
                        f"{SMALL_PAGES}"
                    )
                    return [Finding("huge pages", "note", text)]
                continue
            unmount(name, detach=True)
            if _shmem_denied():
                return [
                    Finding(
                        "huge pages",
                        "note",
                        f"{SHMEM_HUGE} says deny: {SMALL_PAGES}; write never there, which denies "
                        "nothing",
                        (f"echo never >{SHMEM_HUGE}",),
                    )
                ]
            return [Finding("huge pages", "ok", f"tmpfs takes huge={huge}")]
    return [Finding("huge pages", "note", f"this kernel's tmpfs has no huge pages: {SMALL_PAGES}")]


def _shmem_denied() -> bool:
    try:
        return "[deny]" in SHMEM_HUGE.read_text()
    except OSError:
        return False


def _system_mount() -> list[Finding]:
    for directory in ("/sbin", "/usr/sbin"):
        if (Path(directory) / "mount.acpfs").exists():
            return [
                Finding(
                    "mount helper",
                    "ok",
                    f"{directory}/mount.acpfs: `mount -t acpfs` and fstab work",
                )
            ]
    own = shutil.which("mount.acpfs")
    if own is None:
        return [
            Finding(
                "mount helper",
                "note",
                "for `mount -t acpfs` and fstab: ln -s …/bin/mount.acpfs /sbin/mount.acpfs",
            )
        ]
    names = ("mount.acpfs", "umount.fuse.acpfs")
    fix = tuple(
        f"ln -s {shlex.quote(str(Path(own).with_name(name)))} /sbin/{name}" for name in names
    )
    return [Finding("mount helper", "note", f"for `mount -t acpfs` and fstab: {fix[0]}", fix)]


def _sysctl(setting: str) -> tuple[str, ...]:
    """Now, and after the next start of the machine."""
    return (
        f"sysctl -w {setting}",
        (
            f"echo {setting} "
            f">/etc/sysctl.d/60-acpfs-{setting.split('=', maxsplit=1)[0].rpartition('.')[2]}.conf"
        ),
    )


def _install(*packages: str) -> str:
    """By this machine's package manager; names as Debian has them, and their counterparts."""
    if shutil.which("dnf") and not shutil.which("apt-get"):
        return "dnf install -y " + " ".join(OTHER_NAMES.get(name, name) for name in packages)
    return "apt-get install -y " + " ".join(packages)


def _tidy(own: Path) -> None:
    """Leave no trace in a directory that was never mounted; what is not empty belongs to mounts."""
    for name in (
        f"staging/{PROBE_NODE}",
        f"kept/{PROBE_NODE}",
        "staging",
        "kept",
        "areas",
        "journals",
        "manifest",
        "mirrors",
        "nodes",
        "",
    ):
        with contextlib.suppress(OSError):
            (own / name).rmdir()


def _backing(backing: Path) -> list[Finding]:
    def look() -> tuple[ProbeReport | None, os.statvfs_result]:
        check_backing(backing)
        space = os.statvfs(backing)
        if _lacking(space):
            return None, space  # to try what it can do takes room
        directory = BackingDirectory(backing, PROBE_NODE, real_runtime())
        try:
            return probe(directory), space
        finally:
            directory.disconnect()
            _tidy(backing / ".acpfs")

    report, space = apart(BACKING_WAIT_S, f"backing directory {backing} does not answer", look)
    if report is None:
        return _room(backing, space)
    has = [
        name.replace("_", " ") for name, value in asdict(report.features).items() if value is True
    ]
    findings = [
        Finding(
            "backing directory",
            "ok",
            f"{backing}: {', '.join(has)}, names up to {report.features.name_bytes_max} bytes",
        )
    ]
    findings += _room(backing, space)
    findings += [Finding("backing directory", "note", note) for note in report.notes]
    return [*findings, *(_inherited_acls() if report.features.acls else []), _locks()]


def _storage(backing: Path) -> Storage:
    fd = os.open(backing, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return storage_at(fd, kind_at(fd))
    finally:
        os.close(fd)


def _is_another_client(first: Path, second: Path) -> bool:
    """Whether what `second` does is not known to the client of `first` beforehand, or there are no
    clients: a local file system.

    Of another kind it may be what lies over the same client, as bindfs.
    """
    kind = _storage(first).kind
    if not kind or kind != _storage(second).kind:
        return False
    return kind in LOCAL or os.stat(first).st_dev != os.stat(second).st_dev


def _note_late_calls(backing: Path, second: Path | None, found: LateCalls) -> bool:
    """For members: what is bad always, what is good where another client has shown it. Whether it
    was.
    """
    is_shown = second is not None and _is_another_client(backing, second)
    if is_shown or not found.are_refused:
        note(backing, _storage(backing), found, real_runtime().clock.wall())
    return is_shown


def _late_calls(backing: Path, second: Path | None) -> list[Finding]:
    """Whether a node's log could be taken over there, with what its storage client still holds."""

    def look() -> tuple[LateCalls, bool] | None:
        check_backing(backing)
        if _lacking(os.statvfs(backing)):
            return None
        try:
            found = try_late_calls(backing, second or backing, real_runtime().chance)
            return found, _note_late_calls(backing, second, found)
        finally:
            _tidy(backing / ".acpfs")

    looked = apart(BACKING_WAIT_S, f"backing directory {backing} does not answer", look)
    if looked is None:
        return []
    found, is_shown = looked
    how = (
        f"made through {second}"
        if second is not None
        else "made through the same mount; --second names another one, as another client has it"
    )
    if found.are_refused:
        text = (
            f"what comes late through a removed staging directory is refused (the fence was {how})"
        )
        if second is not None and not is_shown:
            text += "; members are not told, as that is no other client's mount of the same kind"
        return [Finding("late calls", "ok", text)]
    parts = [
        *([f"carried out: {', '.join(found.carried_out)}"] if found.carried_out else []),
        *([f"not clear: {', '.join(found.unclear)}"] if found.unclear else []),
    ]
    text = (
        f"what comes late through a removed staging directory is {'; '.join(parts)} "
        f"(the fence was {how}): nobody may take over a node's log here unless its machine is off"
    )
    return [Finding("late calls", "note", text)]


def _room(backing: Path, space: os.statvfs_result) -> list[Finding]:
    """What acpfs would get of it, which has no right to what is reserved for root."""
    free = space.f_bavail * space.f_frsize
    gib = 1 << 30
    if lacking := _lacking(space):
        text = (
            f"{backing} is full, no {lacking} are free: "
            "what is saved stays in RAM until there is room"
        )
        return [Finding("room", "bad", text)]
    ram = budget_bytes(DEFAULT_SHARE, read_memory())
    text = f"{free / gib:.1f} GiB are free in {backing}"
    if free < ram:
        return [Finding("room", "note", f"{text}, less than RAM would take ({ram / gib:.1f} GiB)")]
    return [Finding("room", "ok", text)]


def _lacking(space: os.statvfs_result) -> str:
    """Of what it has none left; "" where it has room."""
    if space.f_bavail * space.f_frsize < FULL_BYTES:
        return "bytes"
    return "inodes" if space.f_files and not space.f_favail else ""


def _locks() -> Finding:
    text = (
        "flock and fcntl keep out programs of this mount only (--locks refuse: none is granted); "
        "O_EXCL and mkdir know of other machines what is on the storage"
    )
    return Finding("locks", "ok", text)


def _inherited_acls() -> list[Finding]:
    """What libfuse loses of ACLs, where that would be the transport."""
    if not transports.native_lacks(transports.MachineSupport.this()):
        return []
    text = (
        "with libfuse the umask narrows what a directory's default ACL gives to new files: set "
        "it to 0"
    )
    return [Finding("ACLs", "note", text)]


def _spill(spill: Path, backing: Path | None) -> list[Finding]:
    others = {"backing directory": backing} if backing is not None else {}
    apart(
        BACKING_WAIT_S,
        f"spill directory {spill} does not answer",
        lambda: check_spill(spill, others),
    )
    space = os.statvfs(spill)
    gib = 1 << 30
    free = space.f_bavail * space.f_frsize
    ram = budget_bytes(DEFAULT_SHARE, read_memory())
    notes = complaints(spill, None if backing is None else Path(os.path.realpath(backing)))
    if free < ram:
        notes.append(
            f"{free / gib:.1f} GiB are free there, less than the RAM tier would get "
            f"({ram / gib:.1f} GiB): it helps little"
        )
    found = Finding("spill directory", "ok", f"{spill}: {free / gib:.1f} GiB free")
    return [found, *(Finding("spill directory", "note", note) for note in notes)]
