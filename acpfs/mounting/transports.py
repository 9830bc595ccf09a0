"""Which transport serves a mount, and why.

`auto` is decided twice: here by what the machine offers, and, where that was native, by whether its
session can really be made (`worker.serving`).
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from acpfs.config import Transport
from acpfs.errors import MachineError

DEV_FUSE = Path("/dev/fuse")
OWN_STATUS = Path("/proc/self/status")
SYS_ADMIN_BIT = 1 << 21
KERNEL_MIN = (5, 4)
"""FUSE 7.31."""
HELPER = "fusermount3"
LIBFUSE_PACKAGE = "pyfuse3"
HOW_TO_GET_LIBFUSE = (
    f"pip install 'acpfs[libfuse]' brings {LIBFUSE_PACKAGE}, which needs a compiler and "
    "libfuse's headers"
)


@dataclass(frozen=True, slots=True)
class TransportChoice:
    """A transport and why it is the one."""

    transport: Transport
    reason: str
    forced: bool = True
    """No other may take its place."""


@dataclass(frozen=True, slots=True)
class MachineSupport:
    """What `choose` looks at; another one in tests."""

    release: str
    device: Path = DEV_FUSE
    status: Path = OWN_STATUS
    is_root: bool = True
    helper: str | None = None
    """The set-uid program that mounts for users."""
    libfuse: bool = True
    """The package of the libfuse transport is installed."""

    @classmethod
    def this(cls) -> MachineSupport:
        """The one that this process runs on."""
        return cls(
            os.uname().release,
            is_root=os.geteuid() == 0,
            helper=shutil.which(HELPER),
            libfuse=has_libfuse(),
        )


def choose(
    wanted: Transport, machine: MachineSupport | None = None, needs_native: str = ""
) -> TransportChoice:
    """The transport to use; `auto` is native wherever that can mount.

    `needs_native`: the setting that libfuse cannot keep (`Settings.needs_native`).

    Raises:
        MachineError: only libfuse could mount here, and its package is not installed,
            or there is something that it cannot keep.
    """
    machine = machine or MachineSupport.this()
    if wanted is Transport.LIBFUSE and not machine.libfuse:
        raise MachineError(f"the libfuse transport is not installed: {HOW_TO_GET_LIBFUSE}")
    if wanted is not Transport.AUTO:
        return TransportChoice(wanted, "asked for")
    missing = native_lacks(machine)
    if missing and needs_native:
        raise MachineError(
            f"{needs_native} needs the native transport, which is not possible here: {missing}"
        )
    if missing and not machine.libfuse:
        if not _may_open(machine):  # libfuse could not either
            raise MachineError(f"no transport is possible here: {missing}")
        raise MachineError(
            f"the native transport is not possible here ({missing}), and libfuse is not "
            f"installed: {HOW_TO_GET_LIBFUSE}"
        )
    if missing:
        return TransportChoice(
            Transport.LIBFUSE, f"the native transport is not possible here: {missing}", forced=False
        )
    how = "" if may_mount(machine.status) else f"; mounted by {HELPER}, so without passthrough"
    reason = f"the fastest that works here{how}"
    return TransportChoice(Transport.NATIVE, reason, forced=bool(needs_native))


def has_libfuse() -> bool:
    """The package of the libfuse transport is installed; it is looked for, not imported."""
    return importlib.util.find_spec(LIBFUSE_PACKAGE) is not None


def native_lacks(machine: MachineSupport) -> str:
    """What the native transport would need and this machine has not; "" for nothing."""
    version = re.match(r"(\d+)\.(\d+)", machine.release)
    if version is None or (int(version[1]), int(version[2])) < KERNEL_MIN:
        return f"Linux {machine.release} is older than {KERNEL_MIN[0]}.{KERNEL_MIN[1]}"
    if not _may_open(machine):
        return f"{machine.device} may not be opened"
    if not may_mount(machine.status) and (machine.is_root or machine.helper is None):
        # root without the capability is in a container, where the set-uid helper cannot mount
        # either
        return f"neither CAP_SYS_ADMIN nor a user's {HELPER}"
    return ""


def _may_open(machine: MachineSupport) -> bool:
    return os.access(machine.device, os.R_OK | os.W_OK)


def may_mount(status: Path = OWN_STATUS) -> bool:
    """CAP_SYS_ADMIN is effective; root in a container may lack it."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return False
    return any(
        int(line.split()[1], 16) & SYS_ADMIN_BIT for line in lines if line.startswith("CapEff:")
    )
