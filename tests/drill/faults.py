"""What is killed, how, and what must be true afterwards.

Each fault is one cycle on a stand: work, kill, look, mend, drain, look.

The stand is drained and its history begun anew at the end of each.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from acpfs.descriptors import readable
from tests.drill import points, verdict
from tests.drill.stand import Stand, _wait_dead

WORK_S_MAX = 0.5
CHARGE_WAIT_S = 1.2
"""A point that is not passed in this time is given up, and the kill comes at a random moment."""
IN_A_ROW = 0.35
"""How often the next daemon is killed again while it recovers."""


@dataclass
class Outcome:
    """What one cycle brought."""

    losses: list[str] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    """One entry per kill: where it happened."""
    instants: int = 0
    """Further instants that were looked at without a kill."""
    copies: int = 0
    """Files that lay in the spill directory when something died."""


AT_RANDOM = "at a random moment"


def let_work(seconds: float) -> None:
    """Let the others work for a while."""
    select.select([], [], [], seconds)


def die_somewhere(stand: Stand) -> str:
    """Kill the worker at a point, or at a random moment, while the application works; returns the
    point's name.
    """
    where, moment_s = kill_at(stand, stand.wait_for_work)
    stand.under_way.note(moment_s)
    return where


def kill_at(stand: Stand, wait_for_work: Callable[[], None] = lambda: None) -> tuple[str, float]:
    """The same, whatever the application does; returns the moment, too."""
    pid = stand.mount.pid
    if stand.random.random() < 0.7:
        number = stand.random.choice(stand.death_points)
        stand.charge(number, 1 + int(stand.random.expovariate(0.15)))
        with contextlib.suppress(ProcessLookupError), contextlib.ExitStack() as closing:
            fd = os.pidfd_open(pid)
            closing.callback(os.close, fd)
            if readable(fd, CHARGE_WAIT_S):
                return points.label(number), time.monotonic()
        if stand.withdraw():
            moment_s = time.monotonic()
            _wait_dead(pid)
            return points.label(number), moment_s
    else:
        let_work(stand.random.random() * WORK_S_MAX)
    wait_for_work()
    moment_s = time.monotonic()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _wait_dead(pid)
    return AT_RANDOM, moment_s


def kill_daemon(stand: Stand) -> Outcome:
    """All of acpfs' processes die, the mount with them; it is mounted anew, perhaps several times,
    before the drain is through.
    """
    stand.go()
    outcome = Outcome(killed=[die_somewhere(stand)])
    stand.kill_all()
    stand.stop()
    come_back(stand, outcome)
    return outcome


def come_back(stand: Stand, outcome: Outcome) -> None:
    """After the death of all: mount anew, and look at everything on the way."""
    outcome.losses += stand.check_backing("after the kill")
    while True:
        stand.withdraw()
        stand.mount.detach()
        stand.mount.start()
        stand.history, lost = verdict.check_mount(stand.history, *stand.read_mount())
        outcome.losses += lost
        stand.history.lose_writers()
        if stand.random.random() > IN_A_ROW or outcome.losses:
            break
        outcome.killed.append(kill_at(stand)[0])
        stand.kill_all()
        outcome.losses += stand.check_backing("after another kill")
    outcome.losses += stand.check_undecided() + _settle(stand)


def _settle(stand: Stand) -> list[str]:
    """What lost its writer is stored as it is; then everything must be there."""
    stand.mount.ask("retry", paths=[""])
    stand.history.publish_all()
    losses = stand.check_drained()
    stand.begin()
    return losses


def kill_worker(stand: Stand) -> Outcome:
    """The worker dies, again and again, and is brought back: the application notices nothing."""
    stand.go()
    outcome = Outcome()
    for _ in range(stand.random.randrange(1, 1 + stand.worker_deaths_max)):
        outcome.killed.append(die_somewhere(stand))
        stand.wait_served()
    outcome.losses = nothing_noticed(stand)
    return outcome


def kill_supervisor(stand: Stand) -> Outcome:
    """Whoever brings workers back dies itself."""
    stand.go()
    let_work(stand.random.random() * WORK_S_MAX)
    stand.wait_for_work()
    before = stand.mount.supervisor
    stand.under_way.note()
    for pid in stand.supervisors():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _wait_dead(pid)
    stand.wait_adopted(before)
    let_work(stand.random.random() * WORK_S_MAX)
    return Outcome(nothing_noticed(stand), [AT_RANDOM])


def nothing_noticed(stand: Stand) -> list[str]:
    answer = stand.stop()
    if "failed" in answer:
        losses = [f"the application saw an error: {answer['failed']}"]
        stand.history, lost = verdict.check_mount(stand.history, *stand.read_mount())
        stand.history.lose_writers()
        return losses + lost + _settle(stand)
    losses = check_still(stand) + stand.check_reads()
    return losses + drain(stand)


def check_still(stand: Stand) -> list[str]:
    """The backing directory as it is at one instant: the worker is stopped while it is read."""
    with stand.standing_still():
        return stand.check_backing("while it drains")


def drain(stand: Stand) -> list[str]:
    """Everything must be there; then a new history."""
    losses = stand.check_drained()
    stand.begin()
    return losses


def kill_application(stand: Stand) -> Outcome:
    """The application dies with files open; what it had written counts as closed, once somebody
    says so of what is no log (S181).
    """
    stand.go()
    let_work(stand.random.random() * WORK_S_MAX)
    stand.wait_for_work()
    stand.under_way.note()
    stand.kill_application()
    stand.history, losses = verdict.check_mount(stand.history, *stand.read_mount())
    if not stand.writes_logs:
        stand.history.lose_writers()
        losses += stand.check_undecided()
    stand.mount.ask("retry", paths=[""])
    stand.history.close_all()
    stand.history.publish_all()
    losses += check_still(stand) + stand.check_reads()
    return Outcome(losses + drain(stand), [AT_RANDOM])
