"""What each part gets through its constructor, and takes from nowhere else."""

from __future__ import annotations

from dataclasses import dataclass

from acpfs.runtime.chance import Chance
from acpfs.runtime.clock import Clock
from acpfs.runtime.machine import Machine
from acpfs.runtime.threads import Threads


@dataclass(frozen=True, slots=True)
class Runtime:
    """Of one worker."""

    clock: Clock
    threads: Threads
    machine: Machine
    chance: Chance
