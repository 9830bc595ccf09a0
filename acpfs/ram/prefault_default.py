"""Whether memory is made ready where nobody asked for it: only where it helps, and only with memory
that nobody uses.

It helps on virtual machines: their host backs memory at the first touch, and may take back what is
free (free page reporting). On other machines what a save waits for is zeroing, which memory made
ready does not save. Pure reading of /proc and /sys; roots are parameters so that tests can lay out
a machine of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from acpfs.config import share_of
from acpfs.processes import PROC
from acpfs.runtime.clock import Clock

SHARE = "25%"
"""Of the budget."""
SHARE_MAX = "50%"
"""Where the largest save that is known needs more."""
PRESSURE_MAX = 1.0
"""Percent of the last ten seconds in which somebody waited for memory (`some avg10`); above,
everything is given back.
"""
CALM_S = 60.0
"""After pressure nothing is made ready for so long."""
NOTHING_BYTES = -(1 << 62)
"""Less than nothing is available: what is ready is given back as well."""
_SYS = Path("/sys")
_VENDORS = (
    "qemu",
    "kvm",
    "vmware",
    "virtualbox",
    "xen",
    "openstack",
    "google compute engine",
    "virtual machine",
    "alibaba cloud ecs",
)


@dataclass(frozen=True, slots=True)
class PrefaultChoice:
    """What `prefault = auto` means here."""

    wanted: int | str
    """Bytes, or a share of the budget."""
    reason: str
    wanted_max: int | str = 0
    """As much where saves are known to need it."""

    def bytes(self, budget_bytes: int, save_bytes: int) -> int:
        """Of a budget; `save_bytes`: what the largest save that is known takes, and what comes free
        ahead of it.
        """
        least = share_of(self.wanted, budget_bytes)
        most = share_of(self.wanted_max, budget_bytes)
        return max(least, min(most, save_bytes))


def choose(limit_bytes: int | None, proc: Path = PROC, sys: Path = _SYS) -> PrefaultChoice:
    """`limit_bytes`: of the control group around the daemon; there what is made ready counts
    against what the group runs.
    """
    if limit_bytes is not None:
        return PrefaultChoice(0, "the daemon's control group has a limit")
    if not is_virtual(proc, sys):
        return PrefaultChoice(0, "this is no virtual machine")
    return PrefaultChoice(SHARE, "this is a virtual machine", SHARE_MAX)


def is_virtual(proc: Path = PROC, sys: Path = _SYS) -> bool:
    """Whether a host backs this machine's memory.

    The processor says so on x86, the firmware elsewhere.
    """
    if (sys / "hypervisor/type").exists():
        return True
    if "hypervisor" in _read(proc / "cpuinfo").partition("\n\n")[0].split():
        return True
    firmware = " ".join(
        _read(sys / "class/dmi/id" / name) for name in ("sys_vendor", "product_name")
    ).lower()
    return any(vendor in firmware for vendor in _VENDORS)


class UnusedMemory:
    """How much memory nobody uses, page cache included: what is free, and nothing while somebody
    waits for memory.
    """

    def __init__(
        self,
        takeable: Callable[[], int],
        clock: Clock,
        proc: Path = PROC,
    ) -> None:
        """`takeable`: bytes that this process may still take without hurting others."""
        self._takeable = takeable
        self._proc = proc
        self._clock = clock.now
        self._calm_at = clock.now()

    def bytes(self) -> int:
        """Bytes; `NOTHING_BYTES` where what is ready should be given back as well."""
        if self._pressure() > PRESSURE_MAX:
            self._calm_at = self._clock() + CALM_S
        if self._clock() < self._calm_at:
            return NOTHING_BYTES
        return min(self._takeable(), self._free())

    def _free(self) -> int:
        lines = _read(self._proc / "meminfo").splitlines()
        return next(
            (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemFree:")), 0
        )

    def _pressure(self) -> float:
        """0 where the kernel does not count it."""
        some = _read(self._proc / "pressure/memory").partition("\n")[0]
        return next((float(word[6:]) for word in some.split() if word.startswith("avg10=")), 0.0)


def _read(path: Path) -> str:
    with suppress(OSError):  # EOPNOTSUPP where pressure is not counted
        return path.read_text(encoding="ascii", errors="replace")
    return ""
