"""One mount as its keeper sees it: the descriptors and facts that are held, who has it, and since
when nobody serves it.

Owns the phases, and the rule by which a mount is given to nobody while a process lives that may
serve it: the supervisor's connection is among what each worker gets, so it ends with the last of
them; only what is stuck in a call that does not return may keep it open. The end alone is no proof:
who could not get rid of a message gives its connection up and serves on. So the pidfds count as
well. The keeper's; standard library only, no thread, and no call on the mount.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from acpfs.supervisor.instances import outlived
from acpfs.supervisor.stuck_processes import STUCK, has_ended, is_stuck

SESSION = "session"
WAIT_S = 300.0
"""For a supervisor that has not said how long its mount waits for the next one."""
GIVEN_UP_S = 5.0
"""A process that ends closes its connection a moment before its pidfd says so; one that lives for
longer has given the connection up.
"""


class Phase(Enum):
    """Who has the mount."""

    SERVED = "served"
    """A supervisor that has told all that is to be held, or is about to."""
    ALONE = "alone"
    """Nobody; calls wait in the kernel."""
    GIVEN = "given"
    """A supervisor whose worker has not served yet."""


STEPS = {
    Phase.SERVED: {Phase.SERVED, Phase.ALONE},
    Phase.ALONE: {Phase.GIVEN, Phase.SERVED},
    Phase.GIVEN: {Phase.SERVED, Phase.ALONE},
}


class HeldSession:
    """Begins when a supervisor first tells of its mount."""

    def __init__(self, mountpoint: str) -> None:
        self.mountpoint = mountpoint
        self.phase = Phase.SERVED
        self.fds: dict[str, list[int]] = {}
        self.state: dict[str, Any] = {}
        self.whole = False
        """All that is to be held has been told once."""
        self.owner: socket.socket | None = None
        self.alone_since = 0.0
        """Monotonic, seconds: when the last one that served it ended; 0: it is served."""
        self._token = ""
        self._supervisor = -1
        """Its pidfd."""
        self._worker = -1
        """Its pidfd."""
        self._starting = False
        """A worker may live that has not been told of."""
        self._unheard_since = 0.0
        """Monotonic, seconds: when the connection ended."""

    @property
    def patience_s(self) -> float:
        """How long the mount waits for a supervisor; 0: for ever."""
        return float(self.state.get("settings", {}).get("keeper_wait_s", WAIT_S))

    @property
    def waits(self) -> bool:
        """Whether it is not served."""
        return self.phase is not Phase.SERVED

    def is_cut_off(self, now: float) -> bool:
        """Whether the connection has just ended, and not yet those who may serve it."""
        return (
            self.owner is None
            and self.phase is not Phase.ALONE
            and now - self._unheard_since < GIVEN_UP_S
        )

    @property
    def how_it_ends(self) -> str:
        """What becomes of it when nobody comes."""
        if self.state.get("settings", {}).get("on_failure") == "stop":
            return "calls end with an error from now on"
        return "what is open in it ends with an error, and new opens reach the backing directory"

    def is_late(self, now: float) -> bool:
        """Whether it has waited long enough, also for one that was given it and does not serve."""
        return self.waits and self.patience_s > 0 and now - self.alone_since >= self.patience_s

    # -- what its supervisor says. Whatever descriptor is kept is taken out of `fds`, in the same
    # step; the rest is the caller's to close.

    def begin(self, end: socket.socket, message: dict[str, Any], fds: list[int]) -> None:
        """A supervisor has it, and its worker serves; all that is to be held follows."""
        token = message["session"]
        if token != self._token:
            self.close()  # of an earlier mount at this place
        self._token = token
        self.whole = False
        self.owner = end
        self.alone_since = 0.0
        self._set_supervisor(fds)
        self._go(Phase.SERVED)

    def told(self, message: dict[str, Any], fds: list[int]) -> None:
        """More of it, or a change.

        Raises:
            ValueError: it has another number of descriptors than it says.
        """
        if "state" in message:
            self.state = dict(message["state"])
        if "starting" in message:
            self._starting = True
        if "whole" in message:
            self.whole = True
            for name in self.fds.keys() - set(message["whole"]):
                _close(self.fds.pop(name))
        if "worker" in message:
            self._starting = False
            _close([self._worker])
            self._worker = _taken(fds)
        if "keep" in message:
            ((name, count),) = message["keep"]
            if len(fds) != count:  # this process has no number left for them
                raise ValueError(f"{len(fds)} descriptors came of the {count} of {name!r}")
            _close(self.fds.pop(name, ()))
            if fds:
                self.fds[name] = fds[:]
                fds.clear()

    # -- whether anybody is left

    def look(self, now: float) -> None:
        """Whether those who may serve it have ended; the connection may be open in a process that
        will never run again.
        """
        if self.phase is Phase.ALONE:
            return
        if self.owner is not None and (
            self._starting or self._supervisor < 0 or not has_ended(self._supervisor)
        ):
            return
        if not self._somebody_lives():
            self._left(now)

    def cut_off(self, now: float) -> None:
        """Its connection has ended."""
        self.owner = None
        self._unheard_since = now
        self.look(now)

    def is_given_up(self, now: float) -> bool:
        """Whether somebody serves it who tells nothing any more: what is held here becomes
        untrue.
        """
        return (
            self.owner is None
            and self.phase is Phase.SERVED
            and now - self._unheard_since >= GIVEN_UP_S
        )

    def _somebody_lives(self) -> bool:
        if self._supervisor >= 0 and not has_ended(self._supervisor):
            return True
        return (
            self._worker >= 0
            and not has_ended(self._worker)
            and not is_stuck(_number_of(self._worker))
        )

    def _left(self, now: float) -> None:
        """The last process that could serve it has ended."""
        self.owner = None
        if self._worker >= 0 and not has_ended(self._worker):
            self.fds.setdefault(STUCK, []).append(
                self._worker
            )  # whoever goes on waits for its call
        else:
            _close([self._worker])
        _close([self._supervisor])
        self._worker = -1
        self._supervisor = -1
        self._starting = False
        self.alone_since = self.alone_since or now
        self._go(Phase.ALONE)

    def session_ended(self) -> bool:
        """Whether the kernel has ended the session, so that nobody can go on with it."""
        looks = select.poll()
        for fd in self.fds.get(SESSION, ())[:1]:
            looks.register(fd, 0)
        return SESSION not in self.fds or any(
            events & (select.POLLERR | select.POLLHUP) for _fd, events in looks.poll(0)
        )

    # -- whoever asks for it

    def refusal(self, asked: dict[str, Any]) -> str:
        """Why it is not given; "": it is."""
        if self.phase is Phase.SERVED:
            return "its supervisor or its worker lives"
        if self.phase is Phase.GIVEN:
            return "another supervisor is about to go on with it"
        backing = self.state.get("settings", {}).get("backing")
        if asked["backing"] != backing:
            return f"the mount has another backing directory: {backing}"
        return outlived(self.state, asked.get("instance", ""))

    def give(self, end: socket.socket, fds: list[int]) -> None:
        """To the supervisor behind that connection; the copies stay here."""
        self.owner = end
        self._set_supervisor(fds)
        self._go(Phase.GIVEN)

    def report(self, now: float) -> dict[str, Any]:
        """For people."""
        alone_s = now - self.alone_since if self.waits else 0.0
        return {
            "mount": self.mountpoint,
            "backing": self.state.get("settings", {}).get("backing", ""),
            "phase": self.phase.value,
            "alone_s": alone_s,
            "left_s": max(0.0, self.patience_s - alone_s)
            if self.waits and self.patience_s
            else None,
            "descriptors": sum(len(fds) for fds in self.fds.values()),
            "generation": self.state.get("generation", 0),
        }

    # -- its end

    def take_away(self, runtime: Path) -> None:
        """Uncover the backing directory, or leave the mount dead.

        In a process of its own: it may wait for the backing directory.
        """
        from acpfs.supervisor import fallthrough

        reason = (
            "all processes of the mount were killed, and none came back within "
            f"{self.patience_s:g} s"
        )
        fallthrough.end_mount(runtime, self.state["settings"], self.state["facts"], reason)

    def close(self) -> None:
        """Let go of all that is held for the next one."""
        for fds in self.fds.values():
            _close(fds)
        self.fds.clear()

    def drop(self) -> None:
        """Let go of all descriptors: it ends, or is another's to hold."""
        self.close()
        _close([self._supervisor, self._worker])
        self._supervisor = -1
        self._worker = -1

    def _set_supervisor(self, fds: list[int]) -> None:
        _close([self._supervisor])
        self._supervisor = _taken(fds)

    def _go(self, phase: Phase) -> None:
        assert phase in STEPS[self.phase], (self.phase, phase)
        self.phase = phase


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)


def _taken(fds: list[int]) -> int:
    """The only one, if there is any."""
    return fds.pop(0) if fds else -1


def _number_of(pidfd: int) -> int:
    """Of the process, where it can be seen from here; else one that there is not."""
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
        if line.startswith("Pid:"):
            return int(line.split()[1])
    return -1
