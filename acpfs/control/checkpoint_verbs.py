"""Verbs about checkpoints as a whole: what there is, waiting for so many files, being told when one
is safe.

As `verbs`: arguments in, events and one result out. These look again and again instead of being
woken: which files belong to a checkpoint is only known by looking, and once a quarter of a second
is cheap where nothing was persisted meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import trio

from acpfs.control.reports import CheckpointReport
from acpfs.control.socket_messages import BadRequestError, ControlRequest, Json, RemoteError
from acpfs.control.worker_contract import Report, Subject
from acpfs.errors import ExitCode

LOOK_INTERVAL_S = 0.25
LOOK_SHARE = 20.0
"""Pauses are at least so many times what the look took."""
SETTLE_S = 5.0
SAFE = ("persisted", "verified", "evicted")


async def checkpoints(subject: Subject, request: ControlRequest, _tell: Report) -> Json:
    """What is known of each checkpoint at and below the paths."""
    found = [
        report for path in request.paths() or [b""] for report in await subject.checkpoints(path)
    ]
    return {"items": [asdict(report) for report in found]}


async def wait_for_count(
    subject: Subject, paths: Sequence[bytes], count: int, timeout_s: float | None, tell: Report
) -> int:
    """Wait until at least so many files below the paths are persisted, and none is left there that
    is not; how many.

    Raises:
        RemoteError: not in time (TIMEOUT), or never without an operator (FAILED).
    """
    deadline = trio.current_time() + (float("inf") if timeout_s is None else timeout_s)
    while True:
        began = subject.clock.now()
        seen = [subject.persisted_files(path) for path in paths]
        persisted = sum(pair[0] for pair in seen)
        known = sum(pair[1] for pair in seen)
        if persisted >= count and persisted == known:
            return persisted
        rest = subject.remaining(await subject.complete_until(paths, LOOK_INTERVAL_S), paths)
        if rest.stuck or trio.current_time() >= deadline:
            code = ExitCode.FAILED if rest.stuck else ExitCode.TIMEOUT
            raise _short_of(persisted, count, code)
        await tell(
            {
                "event": "progress",
                "operations": max(count, known) - persisted,
                "bytes": rest.size_bytes,
            }
        )
        pause_s = max(LOOK_INTERVAL_S, LOOK_SHARE * (subject.clock.now() - began))
        await trio.sleep(min(pause_s, max(0.0, deadline - trio.current_time())))


def _short_of(persisted: int, count: int, code: ExitCode) -> RemoteError:
    error = RemoteError(
        f"{persisted} of {count} files are persisted", {"persisted": persisted, "count": count}
    )
    error.exit_code = code
    return error


async def watch(subject: Subject, request: ControlRequest, tell: Report) -> Json:
    """Tell each checkpoint below the paths as soon as it is safe, for ever; once more when it has
    changed since.

    Arguments: `count`: it is safe with so many files, all persisted; without, when nothing came to
    it for `settle_s` seconds. `after`: by CLOCK_MONOTONIC, which client and daemon have in common;
    what was persisted before is not told.
    """
    paths = request.paths() or [b""]
    count = count_of(request)
    settle_s = request.seconds("settle_s")
    settle_s = SETTLE_S if settle_s is None else settle_s
    after = request.seconds("after")
    after = subject.clock.now() if after is None else after
    told: dict[str, tuple[int, int, float]] = {}
    seen = -1
    unripe = False
    while True:
        began = subject.clock.now()
        if unripe or subject.settlements() != seen:
            seen = subject.settlements()
            unripe = False
            for report in [report for path in paths for report in await subject.checkpoints(path)]:
                closed, persisted = subject.moments(report)
                if report.state not in SAFE or persisted <= after:
                    continue
                if report.files < count if count else subject.clock.now() - closed < settle_s:
                    unripe = True
                    continue
                mark = (report.files, report.bytes, persisted)
                if told.get(report.path) != mark:
                    told[report.path] = mark
                    await tell(_event(subject, report))
        await trio.sleep(max(LOOK_INTERVAL_S, LOOK_SHARE * (subject.clock.now() - began)))


def _event(subject: Subject, report: CheckpointReport) -> Json:
    files = [asdict(file) for file in subject.checkpoint_files(report)]
    return {"event": "checkpoint", "checkpoint": asdict(report), "files": files}


def count_of(request: ControlRequest) -> int:
    """How many files are asked for; 0: any number."""
    count = request.args.get("count")
    if count is None:
        return 0
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= 1 << 40:
        raise BadRequestError(f"{request.verb}: count must be a positive number")
    return count
