"""On which NUMA nodes the RAM tier's pages lie: the tmpfs memory policy (`mpol=`) behind the
setting `numa`.

Pages that the kernel allocates for a writer in the passthrough lane follow this policy, not the
writer's own. Pure reading of /sys; the root is a parameter so that tests can lay out a machine of
their own. Thread-safe.
"""

from __future__ import annotations

from pathlib import Path

from acpfs.errors import MachineError

NODES = Path("/sys/devices/system/node")


def mount_option(numa: str, nodes: Path = NODES) -> str:
    """What to add to a tmpfs' options for a setting such as `interleave` or `bind:0-1`; "" for
    `default`.

    Raises:
        MachineError: a NUMA node has no memory here, or the kernel knows no NUMA nodes at all.
    """
    if numa == "default":
        return ""
    try:
        here = (nodes / "has_memory").read_text().strip()
    except OSError:
        raise MachineError(
            f"numa = {numa}: this kernel knows no NUMA nodes (CONFIG_NUMA)"
        ) from None
    missing = _numbers(numa.partition(":")[2]) - _numbers(here)
    if missing:
        named = ", ".join(str(number) for number in sorted(missing))
        raise MachineError(
            f"numa = {numa}: this machine has no memory on NUMA node {named} (it has some on "
            f"{here})"
        )
    return f",mpol={numa}"


def policy_of(options: str) -> str:
    """The memory policy in a mount table's options, as the setting has it (node lists hold commas,
    and so do options).
    """
    _before, found, after = f",{options}".partition(",mpol=")
    if not found:
        return "default"
    first, *others = after.split(",")
    for word in others:
        if not word[:1].isdigit():
            break
        first += f",{word}"
    return first


def _numbers(listed: str) -> set[int]:
    """`0-2,5` → {0, 1, 2, 5}."""
    found: set[int] = set()
    for part in filter(None, listed.split(",")):
        first, _dash, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
