"""What acpfs does inside a training process goes through here: a fault of its own never ends
training. No torch.

Whatever the loop, its optimizer, its framework or a signal calls of acpfs is done by `Guard.ours`.
What comes out of it passes if it is said on purpose (`ConfigError`, `Interrupted`), or is of the
program's own code (`theirs`, handlers of signals). Anything else is a fault of acpfs: it is logged
once with its traceback, protection of this rank is over, the coordinators are told, and the loop
goes on as if there were no acpfs, but for collectives that other ranks wait in: those stay in step.

Main thread only, but for the flag and `failed`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import CodeType
from typing import ParamSpec, TypeVar

from acpfs.errors import ConfigError
from acpfs.logger import get_logger
from acpfs.training.held_signals import HELD
from acpfs.training.interrupt import Interrupted

log = get_logger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
_OF_THE_PROGRAM = "acpfs_is_of_the_program"
TEXT_CHARS_MAX = 300


class OnPurposeError(Exception):
    """Said to the loop in the middle of it; the base of what is no `ConfigError`."""


def theirs(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Code of the program, which acpfs was given: its error is the program's, and passes.

    Raises:
        Exception: whatever it raises.
    """
    try:
        return call(*args, **kwargs)
    except Exception as error:
        vars(error)[_OF_THE_PROGRAM] = True
        raise


class Guard:
    """Of one rank."""

    def __init__(self) -> None:
        self.why: str | None = None
        """What protection of this rank ended with; None: it is on."""
        self._stopped: list[Callable[[], bool]] = []
        self.at_end: list[Callable[[str], object]] = []
        """Called once with the reason, each of them, when protection ends by a fault."""

    def begin(self, is_stopped: Callable[[], bool], at_end: Callable[[str], object]) -> None:
        """`is_stopped`: whether the loop is to be left anyway; what handles that fault needs this
        rank.

        `at_end`: tells the others.
        """
        self._stopped.append(is_stopped)
        self.at_end.append(at_end)

    @property
    def is_off(self) -> bool:
        return self.why is not None

    def ours(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Do it, unless protection is over; None where it is, or ends by this.

        Raises:
            Exception: what is said on purpose, or is of the program's own code.
            Interrupted: acpfs has failed where the loop is to be left anyway.
        """
        if self.why is not None:
            return None
        try:
            return call(*args, **kwargs)
        except Exception as error:
            if _passes(error):
                raise
            self.failed(error)
        return None

    def last(self, call: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> bool:
        """The same at the end, when protection is over in any case: whether it went well; what
        fails is logged.
        """
        try:
            call(*args, **kwargs)
        except Exception as error:
            if _passes(error):
                raise
            log.exception("acpfs failed at the end of protection; the program goes on")
            return False
        return True

    def failed(self, error: Exception) -> None:
        """Acpfs has, in what `ours` called, or in a thread of its own; then `at_end` are called by
        that.

        Raises:
            Interrupted: the loop is to be left anyway.
        """
        if any(is_stopped() for is_stopped in self._stopped):
            log.error("acpfs failed in this rank, which is to leave its loop", exc_info=error)
            raise Interrupted("acpfs failed in a rank that was stopped") from error
        self.why = f"{type(error).__name__}: {error}"[:TEXT_CHARS_MAX]
        log.error(
            "this rank is not protected any more: acpfs failed in it; training goes on",
            error=self.why,
            exc_info=error,
        )
        for tell in self.at_end:
            try:
                tell(self.why)
            except Exception:  # the others have to be told all the same
                log.exception("the end of protection could not be told")


def _passes(error: Exception) -> bool:
    if isinstance(error, ConfigError | OnPurposeError) or _OF_THE_PROGRAM in vars(error):
        return True
    handlers = {_code_of(signal.getsignal(number)) for number in HELD}
    trace = error.__traceback__
    while trace is not None:  # a handler of the program may have come in between two lines of acpfs
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: object) -> CodeType | None:
    found = getattr(getattr(handler, "__func__", handler), "__code__", None)
    return found if isinstance(found, CodeType) else None
