"""The end of a worker by a bug: loud, at once, and before anything that is half done leaves the
process.

Knows neither the bug nor the call. In the thread that had it, under the file system's lock.
"""

from __future__ import annotations

import os
from typing import Any

from acpfs.errors import ExitCode, wanted
from acpfs.logger import get_logger
from acpfs.ram.kept import Kept
from acpfs.worker.link import Link

log = get_logger(__name__)


def of_want(want: str) -> dict[str, Any]:
    """The last words of a worker that ended for want of a resource: the supervisor does not take it
    for one that cannot serve.
    """
    return {
        "exit_code": int(ExitCode.ENVIRONMENT),
        "message": f"the machine has no {want} left for acpfs",
        "wanted": want,
    }


def end_by_bug(link: Link, kept: Kept, error: BaseException) -> None:
    """What a step has changed in memory cannot be undone: the next worker goes on from the last
    whole step, as after kill -9.

    The request that this thread serves, if it does, is answered with an error by that one, and not
    tried again. Want of memory is no bug: then it is tried again.
    """
    if want := wanted(error):
        log.error("a step ended for want of a resource: this worker ends", wanted=want)
        link.last_words(error=of_want(want))
        os._exit(ExitCode.ENVIRONMENT)
    log.error("a bug in a step: this worker ends, and nothing of the step counts", exc_info=error)
    message = f"internal error: {type(error).__name__}: {error}"
    link.last_words(
        given_up=kept.give_up(),
        error={"exit_code": int(ExitCode.FAILED), "message": message},
    )
    os._exit(ExitCode.FAILED)
