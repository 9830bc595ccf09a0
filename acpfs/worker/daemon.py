"""What a worker's process does, from its orders to its end; state of the process (limits, umask,
garbage collection) is set here.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import resource
import signal
import sys
from functools import partial
from typing import Any

import trio

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

from acpfs.config import Settings, validated
from acpfs.errors import AcpfsError, ExitCode, MachineError, wanted
from acpfs.logger import get_logger
from acpfs.ram.state import is_answer
from acpfs.runtime.given import Runtime
from acpfs.runtime.real import real_runtime
from acpfs.worker import logs
from acpfs.worker.assembly import assemble
from acpfs.worker.bugs import of_want
from acpfs.worker.link import Link, orders_of
from acpfs.worker.worker import Worker

OF_WANT = "the worker ends for want of a resource of the machine; another one is tried"
START_WAIT_S = 20.0
"""For all the others that a worker needs before it serves."""
THREAD_WAIT_S = 10.0
"""For the first thread; then the worker ends, and its supervisor tries again."""
GC_THRESHOLDS = (50_000, 20, 50)
"""Nodes and operations live long and form no cycles: looking through them at every 700 new ones
cost 3 % of a small file.
"""
SWITCH_INTERVAL_S = 0.0005
"""How long a thread keeps the interpreter while another wants it. With Python's 5 ms, a request
that comes while the drain computes may wait for that several times: answers took up to 30-74 ms,
with this one 9-19 (medians 2.0 and 1.6), for the same processor time.
"""

log = get_logger(__name__)


def work(orders: dict[str, Any], fds: list[int]) -> int:
    """Be a worker, in a process that was forked from the template, until the mount ends; the exit
    code.
    """
    given = real_runtime()
    link = orders_of(orders, fds, given)
    link.tell(pid=os.getpid())  # the template says so, too, unless it dies just now
    try:
        settings = validated(orders["settings"])
        code = run(settings, link, given, detached=bool(orders["detached"]))
    except AcpfsError as error:
        log.error(
            "the mount could not be made"
            if not link.workers_before
            else "the mount could not be taken over",
            error=str(error),
        )
        link.last_words(
            error={
                "exit_code": int(error.exit_code),
                "message": str(error),
                "wanted": wanted(error),
            }
        )
        return int(error.exit_code)
    except Exception as error:
        if want := wanted(error):
            log.error(OF_WANT, wanted=want, exc_info=error)
            link.last_words(error=of_want(want))
            return int(ExitCode.ENVIRONMENT)
        log.exception("the worker failed")
        link.last_words(
            error={
                "exit_code": int(ExitCode.FAILED),
                "message": f"internal error: {type(error).__name__}: {error}",
            }
        )
        return int(ExitCode.FAILED)
    link.last_words(ended=int(code))
    return int(code)


def run(settings: Settings, link: Link, given: Runtime, *, detached: bool = False) -> ExitCode:
    """Serve until the mount ends.

    Raises:
        AcpfsError: the mount could not be made.
    """
    _set_up_process()
    link.step("opening the log file")
    try:
        logs.configure(settings.log_level, settings.log_file, detached=detached)
    except OSError as error:
        raise MachineError(
            f"cannot write the log file {settings.log_file}: {error.strerror}"
        ) from error
    link.step("starting threads")
    given.threads.be_ready(THREAD_WAIT_S)
    given.threads.follow(partial(_wait_for_threads, link))
    assert settings.runtime_dir is not None, "`starting.prepare` has filled it in"
    parts = assemble(settings, settings.runtime_dir, link, given)
    worker: Worker | None = None
    try:
        worker = Worker(parts, link)
        return trio.run(worker.run)
    except BaseException as error:  # noqa: BLE001 - the one thing in a group of groups is raised
        cause = _single(error)
        if not is_answer(cause):
            with parts.fs.lock:
                parts.state.abandon(cause)  # it may have come in the middle of a step
        raise cause from None
    finally:
        parts.take_apart(nothing_left=worker is not None and worker.nothing_left)


def _wait_for_threads(link: Link, waited_s: float) -> None:
    """A start goes on when it has its threads: that is no step that hangs.

    But it ends, so that its supervisor looks what else there is.
    """
    if link.is_serving:
        return
    if waited_s < START_WAIT_S:
        link.still()
        return
    log.error(OF_WANT, wanted="threads", waited_s=round(waited_s, 1))
    link.last_words(error=of_want("threads"))
    os._exit(ExitCode.ENVIRONMENT)


def _single(error: BaseException) -> BaseException:
    """The one thing that went wrong; trio wraps what leaves a nursery."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _set_up_process() -> None:
    os.umask(0o022)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.set_threshold(*GC_THRESHOLDS)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
