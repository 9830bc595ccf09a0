"""Runs a command between two others, and passes on the signals that are meant for it.

Made to be the first process of a container, too: then whoever is left behind by its parent becomes
its child, and it is told of the container's end. Signals are waited for and not handled, so that
none comes between a look and what follows from it. Knows nothing of mounts.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence

Words = Sequence[str]

PASSED_ON = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
ENDS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
"""Before the command has begun, these mean that it is not to begin."""
PYTHONS_OWN = (signal.SIGPIPE, signal.SIGXFSZ)
"""This interpreter ignores them, and a program that it starts would, too."""
SI_KERNEL = 0x80
"""`si_code` of a signal that the kernel sent, and no process (sigaction(2)): for a key that was
pressed, to all processes of the terminal's foreground.
"""
NOT_FOUND = 127
"""Exit codes as shells have them."""
NOT_EXECUTABLE = 126
BY_SIGNAL = 128

Heard = Callable[[int, signal.struct_siginfo], None]
"""Told of a signal, with the process that runs."""


def run_between(
    before: Words,
    command: Words,
    after: Words,
    environment: dict[str, str],
    failed: Callable[[], None] = lambda: None,
) -> int:
    """Run `before`, `command` with this environment, and `after`; the exit code.

    Where `before` fails there is no more, and its code is returned. Else it is that of `command`,
    or of the signal that was to end it before it began; 1 where `after` failed, which `failed` is
    told of. `after` is run whatever becomes of `command`, and hears of no signal but from the
    terminal.
    """
    # one that is ignored is ignored below, too (nohup, or a shell's command in the background)
    passed_on = [one for one in PASSED_ON if signal.getsignal(one) != signal.SIG_IGN]
    # what a parent has ignored would not be told of a child's end
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    watched = frozenset({signal.SIGCHLD, *passed_on})
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    runner = _Runner(watched, mask)
    ended_by: list[int] = []

    def note(_pid: int, info: signal.struct_siginfo) -> None:
        if info.si_signo in ENDS:
            ended_by.append(info.si_signo)

    try:
        code = runner.run(before, os.environ, note)
        if code:
            return code
        code = BY_SIGNAL + ended_by[0] if ended_by else runner.run(command, environment, _pass_on)
        if runner.run(after, os.environ, note):
            failed()
            code = 1
        return code
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _pass_on(pid: int, info: signal.struct_siginfo) -> None:
    if info.si_code != SI_KERNEL:  # of a key it has been told itself
        os.kill(pid, info.si_signo)  # it is not reaped yet, so the number is its own


class _Runner:
    """Runs one command at a time."""

    def __init__(self, watched: frozenset[signal.Signals], mask: set[signal.Signals | int]) -> None:
        """`watched` is blocked; programs get `mask`."""
        self._watched = watched
        self._mask = mask

    def run(
        self, words: Words, environment: os._Environ[str] | dict[str, str], heard: Heard
    ) -> int:
        """The command's exit code, as shells have it."""
        try:
            pid = os.posix_spawnp(
                words[0], list(words), environment, setsigmask=self._mask, setsigdef=PYTHONS_OWN
            )
        except OSError as error:
            print(f"{words[0]}: {error.strerror}", file=sys.stderr)
            return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
        while True:
            info = signal.sigwaitinfo(self._watched)
            if info.si_signo != signal.SIGCHLD:
                heard(pid, info)
            elif (code := _reaped(pid)) is not None:
                return code


def _reaped(awaited: int) -> int | None:
    """Take leave of all children that have ended, those of others, too: the exit code of that one,
    None while it runs.
    """
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if not pid:
            return code
        if pid == awaited:
            ended = os.waitstatus_to_exitcode(status)
            code = ended if ended >= 0 else BY_SIGNAL - ended
