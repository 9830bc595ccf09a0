"""What each verb of the control socket does: arguments in, events and one result out.

A handler gets the subject, the request and a way to send events. Errors that a user can act on are
`AcpfsError`; the server turns them into an answer. Runs in trio; waits are cancelled when the
client goes away.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import partial

import trio

from acpfs.control.checkpoint_verbs import checkpoints, count_of, wait_for_count, watch
from acpfs.control.reports import Remaining
from acpfs.control.socket_messages import ControlRequest, Json, RemoteError, path_from_text
from acpfs.control.worker_contract import Incomplete, Report, Subject, Unseen
from acpfs.drain_records import QueueEntry, Verification
from acpfs.errors import AcpfsError, DeadlineError, ExitCode

PROGRESS_INTERVAL_S = 0.25
PROGRESS_SHARE = 50.0
"""Looking at a long log must not hold up its drain: pauses are at least so many times what the look
took.
"""
BATCH_ITEMS = 500
LAST_STEP_S = 5.0
"""Each of the steps after the drain, which a mount that is no longer there cannot be spared: so
long whatever the deadline is.
"""
PERSISTED_LOOK_S = 0.02
"""From one look at whether all is persisted to the next; that all is copied is heard at once."""
LOOK_S = 2.0
"""Whether a path is there is looked at for so long, whatever the client's deadline is."""
UNSEEN_AGAIN_S = 1.0
"""From one look at what may have been changed through mappings to the next, where that cannot be
seen.
"""
GOOD = ("ok", "unknown")
"""A file that was written around the mount has no recorded checksum, and that is no fault."""
LEFT_NAMED_MAX = 100
GUARDED = "guarded"
REFUSED = "the backing directory refused some operations for good"
WITHHELD = (
    "pointer files are withheld, because nodes that may have what they point at are missing: see "
    "`acpfs-ctl nodes`, `nodes forget`"
)
DRAINED_ELSEWHERE = "all is persisted, where the backing directory lay when it was opened"
UNVERIFIED = "nothing can be verified there"
LATE = "not everything is persisted in time"

Handler = Callable[[Subject, ControlRequest, Report], Awaitable[Json]]
Answer = Callable[[ControlRequest, Report], Awaitable[Json]]
"""A handler that knows its subject."""


async def status(subject: Subject, _request: ControlRequest, _tell: Report) -> Json:
    return subject.status().to_json()


async def ready(subject: Subject, _request: ControlRequest, _tell: Report) -> Json:
    state = subject.status().state
    return {"ready": state == "serving", "state": state}


async def config(subject: Subject, _request: ControlRequest, _tell: Report) -> Json:
    return subject.configuration()


async def metrics(subject: Subject, _request: ControlRequest, _tell: Report) -> Json:
    return {"text": subject.metrics()}


async def ls(subject: Subject, request: ControlRequest, tell: Report) -> Json:
    files = [file for path in request.paths() or [b""] for file in subject.files(path)]
    for start in range(0, len(files), BATCH_ITEMS):
        await tell(
            {
                "event": "items",
                "items": [asdict(file) for file in files[start : start + BATCH_ITEMS]],
            }
        )
    return {"items": []}


async def flush(subject: Subject, request: ControlRequest, tell: Report) -> Json:
    """Wait until all that was complete at the call is persisted; with paths, say what is not
    complete there.
    """
    deadline = trio.current_time() + _limit(request.seconds("timeout_s"))
    paths = await followed(subject, request.paths(), deadline)
    await _hear_of_mappings(subject, paths, deadline, tell, waits=False)
    at_call = _incomplete_now(subject, paths)
    until = await covering(subject, paths, deadline)
    done = await drain(subject, until, _left_s(deadline), tell, paths)
    await _still_there(subject, DRAINED_ELSEWHERE)
    left = [one for one in still_incomplete(subject, paths, at_call) if not one.is_stored_log]
    if left:
        raise _being_written(left)
    return {**done, "guarded": [asdict(guarded) for guarded in subject.guarded()]}


async def wait(subject: Subject, request: ControlRequest, tell: Report) -> Json:
    """`flush` for named paths; with `verified`, also read them back; with `count`, when so many
    files are persisted.
    """
    paths = request.some_paths()
    count = count_of(request)
    deadline = trio.current_time() + _limit(request.seconds("timeout_s"))
    if count:
        await _hear_of_mappings(subject, paths, deadline, tell)
        still_incomplete(subject, paths, _incomplete_now(subject, paths))
        files = await wait_for_count(subject, paths, count, request.seconds("timeout_s"), tell)
        await _still_there(subject, DRAINED_ELSEWHERE)
        return {"files": files}
    paths = await followed(subject, paths, deadline)
    await _hear_of_mappings(subject, paths, deadline, tell)
    at_call = _incomplete_now(subject, paths)
    if request.flag("copied"):
        return await _until_copied(subject, paths, at_call, deadline, tell)
    until = await covering(subject, paths, deadline)
    with trio.move_on_at(deadline):
        done = await drain(subject, until, None, tell, paths)
        # also what only then turned out not to be complete: a close that does not count
        while still_incomplete(subject, paths, at_call):
            await _completed(subject, paths, at_call, tell)
            until = await covering(subject, paths, deadline)
            await drain(subject, until, None, tell, paths)
        await _still_there(subject, DRAINED_ELSEWHERE)
        if request.flag("verified"):
            done["verified"] = await _check(subject, paths, tell)
        return done
    if left := still_incomplete(subject, paths, at_call):
        raise _being_written(left)
    persisted = subject.remaining(until, paths).operations == 0
    if persisted and not request.flag("verified"):  # with no time at all it is a question
        await _still_there(subject, DRAINED_ELSEWHERE)
        return {"operations": 0, "bytes": 0}
    raise left_over(
        subject,
        until,
        ExitCode.TIMEOUT,
        "persisted, but not verified in time" if persisted else LATE,
    )


async def _until_copied(
    subject: Subject, paths: list[bytes], at_call: dict[int, int], deadline: float, tell: Report
) -> Json:
    """Until another member has the paths, or they are persisted; says which."""
    while left := still_incomplete(subject, paths, at_call):
        with trio.move_on_at(deadline) as waiting:
            await _completed(subject, paths, at_call, tell)
        if waiting.cancelled_caught:
            raise _being_written(left)
    until = await covering(subject, paths, deadline)
    begin = subject.remaining(until, paths)
    copied = subject.copied(until)
    told = _when_done(copied)
    state = ""
    try:
        with trio.move_on_at(deadline):
            async with trio.open_nursery() as nursery:
                # a client takes a daemon that says nothing for dead
                nursery.start_soon(_tell_progress, subject, until, tell)
                while True:
                    state = _safe_as(subject, until, paths, is_copied=copied.done())
                    if state:
                        break
                    with trio.move_on_after(PERSISTED_LOOK_S):
                        await told.wait()
                nursery.cancel_scope.cancel()
    finally:
        copied.cancel()
    if state:
        return {**_counted(begin), "state": state}
    raise left_over(subject, until, ExitCode.TIMEOUT, "neither copied nor persisted in time")


def _when_done(future: Future[None]) -> trio.Event:
    """Set in trio's thread, at once or some time later; not where trio has ended."""
    event = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def tell(_done: Future[None]) -> None:
        with contextlib.suppress(trio.RunFinishedError):
            token.run_sync_soon(event.set)

    future.add_done_callback(tell)
    return event


def _safe_as(subject: Subject, until: int, paths: list[bytes], *, is_copied: bool) -> str:
    """Copied or persisted; nothing where it is neither."""
    if is_copied:
        return "copied"
    return "" if subject.remaining(until, paths).operations else "persisted"


def _counted(begin: Remaining) -> Json:
    return {"operations": begin.operations, "bytes": begin.size_bytes}


async def verify(subject: Subject, request: ControlRequest, tell: Report) -> Json:
    """Scrub: every file below the paths against its recorded checksum; each verdict is an item."""
    await _still_there(subject, UNVERIFIED)
    return {
        "checked": await _check(
            subject, await _recorded(subject, request.paths()), tell, every=True
        ),
        "items": [],
    }


async def _recorded(subject: Subject, paths: Sequence[bytes]) -> list[bytes]:
    """What to verify where paths are named: as `followed`, and what was recorded there, though it
    is gone.
    """
    recorded = [path for path in paths if subject.records(path)]
    return recorded + await followed(
        subject, [path for path in paths if path not in recorded], math.inf
    )


async def repair(subject: Subject, request: ControlRequest, tell: Report) -> Json:
    """Verify; what is not as it was written is stored once more from RAM, in its order, and
    verified again. Each bad file is an item.
    """
    bad: list[Verification] = []

    async def judge(verdict: Verification) -> None:
        if verdict.status not in GOOD:
            bad.append(verdict)

    await _still_there(subject, UNVERIFIED)
    await subject.verify(await _recorded(subject, request.paths()), judge)
    rewritten: dict[str, Verification] = {}
    until = 0
    for verdict in bad:
        outcome = await subject.restore(verdict)
        if isinstance(outcome, str):
            await tell({"event": "items", "items": [asdict(replace(verdict, error=outcome))]})
        else:
            until = max(until, outcome)
            rewritten[verdict.path] = verdict
    if rewritten:
        await drain(
            subject,
            until,
            request.seconds("timeout_s"),
            tell,
            [path_from_text(path) for path in rewritten],
        )
        await subject.verify([path_from_text(path) for path in rewritten], _tell_repaired(tell))
    return {"items": []}


def _tell_repaired(tell: Report) -> Callable[[Verification], Awaitable[None]]:
    async def judge(verdict: Verification) -> None:
        status = "repaired" if verdict.status == "ok" else verdict.status
        await tell({"event": "items", "items": [asdict(replace(verdict, status=status))]})

    return judge


async def retry(subject: Subject, request: ControlRequest, _tell: Report) -> Json:
    return {"operations": subject.retry(request.one_path())}


async def discard(subject: Subject, request: ControlRequest, _tell: Report) -> Json:
    operations, left = subject.discard(request.one_path())
    return {"operations": operations, "open": [_shown(path) for path in left]}


async def release(subject: Subject, request: ControlRequest, _tell: Report) -> Json:
    """Carry out held deletions: at and below the paths, or all."""
    return {"checkpoints": sum(map(subject.release, request.paths() or [b""]))}


async def change(subject: Subject, request: ControlRequest, _tell: Report) -> Json:
    return await subject.change(request.text("key"), request.text("value"))


async def unmount(subject: Subject, request: ControlRequest, tell: Report) -> Json:
    """Drain, take the mount away, drain what came in between, and end.

    With `leave`, what cannot be drained in time does not keep the mount: it stays in the RAM tier.
    """
    leave = request.flag("leave")
    late = False
    timeout_s = request.seconds("timeout_s")
    deadline = trio.current_time() + _limit(timeout_s)
    done: Json = {"operations": 0, "bytes": 0}
    try:
        done = await _drain_complete(subject, [], timeout_s, tell)
        _none_interrupted(subject)
    except RemoteError:
        if not leave:
            raise
        late = True
    await subject.unmount(leave=late, patience_s=max(_left_s(deadline), LAST_STEP_S))
    problem = await subject.problem()
    left = await _finished(subject, max(deadline, trio.current_time() + LAST_STEP_S), tell)
    guarded = [entry for entry in left if entry.state == GUARDED]
    left = [entry for entry in left if entry.state != GUARDED]
    if left and not leave:
        raise _left_error(
            left,
            len(left),
            ExitCode.TIMEOUT,
            "unmounted; what is not persisted is kept in the RAM tier for the next mount",
        )
    named = {
        "left": [asdict(entry) for entry in left[:LEFT_NAMED_MAX]],
        "guarded": [asdict(entry) for entry in guarded[:LEFT_NAMED_MAX]],
    }
    return {**done, **named, "left_operations": len(left), "problem": problem or None}


async def _finished(subject: Subject, deadline: float, tell: Report) -> list[QueueEntry]:
    """What is left when the daemon has done what it could.

    Raises:
        DeadlineError: it is still at it.
    """
    until = await subject.complete_until([], 0)
    with trio.move_on_at(deadline):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_tell_progress, subject, until, tell)
            left = await subject.finished()
            nursery.cancel_scope.cancel()
        return left
    raise left_over(
        subject,
        until,
        ExitCode.TIMEOUT,
        "unmounted; the daemon drains on, and ends when it has done what it can",
    )


async def reload(subject: Subject, _request: ControlRequest, _tell: Report) -> Json:
    """The worker as it is now; another one is on its way."""
    worker = asdict(subject.status().worker)
    subject.reload()
    return worker


async def bypass(subject: Subject, request: ControlRequest, _tell: Report) -> Json:
    await subject.bypass(request.text("reason"))
    return subject.status().to_json()


HANDLERS: dict[str, Handler] = {
    "status": status,
    "ready": ready,
    "config": config,
    "metrics": metrics,
    "ls": ls,
    "flush": flush,
    "wait": wait,
    "verify": verify,
    "repair": repair,
    "retry": retry,
    "discard": discard,
    "release": release,
    "checkpoints": checkpoints,
    "watch": watch,
    "set": change,
    "bypass": bypass,
    "reload": reload,
    "unmount": unmount,
}


def answers(subject: Subject) -> dict[str, Answer]:
    """Verb → what answers it for this subject."""
    return {verb: partial(handler, subject) for verb, handler in HANDLERS.items()}


async def _drain_complete(
    subject: Subject, paths: Sequence[bytes], timeout_s: float | None, tell: Report
) -> Json:
    deadline = trio.current_time() + _limit(timeout_s)
    paths = await followed(subject, paths, deadline)
    until = await covering(subject, paths, deadline)
    return await drain(subject, until, _left_s(deadline), tell, paths)


async def covering(subject: Subject, paths: Sequence[bytes], deadline: float) -> int:
    """Log number that covers the paths, as far as it is known at the deadline (trio's clock)."""
    return await subject.complete_until(paths, _left_s(deadline))


async def followed(subject: Subject, paths: Sequence[bytes], deadline: float) -> list[bytes]:
    """The paths, and what symlinks among them lead to.

    Nothing can be said of a path at which there is nothing.

    Raises:
        AcpfsError: there is nothing at some of them, which it names.
        DeadlineError: the backing directory did not say in time whether there is.
    """
    found = list[bytes]()
    absent = list[bytes]()
    with trio.move_on_at(max(deadline, trio.current_time() + LOOK_S)) as scope:
        for path in paths:
            try:
                found += await subject.follow(path)
            except OSError as error:
                if error.errno != errno.ENOENT:
                    raise AcpfsError(f"{_shown(path)}: {_why_not(error)}") from error
                absent.append(path)
    if scope.cancelled_caught:
        raise DeadlineError(f"the backing directory does not say whether there is {_shown(path)}")
    if absent:
        raise AcpfsError(
            f"no such file or directory in the mount: {', '.join(map(_shown, absent))}"
        )
    return found


def _why_not(error: OSError) -> str:
    if error.errno == errno.EXDEV:
        return "it leads out of the mount"
    return f"the backing directory does not say whether it is there: {error.strerror}"


async def drain(
    subject: Subject, until: int, timeout_s: float | None, tell: Report, paths: Sequence[bytes] = ()
) -> Json:
    """Wait until the log is persisted up to `until`, telling how far it is.

    With paths, what is parked elsewhere does not count.

    Raises:
        RemoteError: not in time (TIMEOUT), or never without an operator (FAILED); with what is
            left.
    """
    start = subject.remaining(until, paths)
    with trio.move_on_after(_limit(timeout_s)):
        while True:
            await _come_to_rest(subject, until, tell, paths)
            await subject.recorded()
            # Meanwhile what was parked may have been tried again: that is no reason to call it
            # late.
            rest = subject.remaining(until, paths)
            if rest.operations == 0 or rest.stuck:
                break
    rest = subject.remaining(until, paths)
    if rest.operations == 0:
        return {"operations": start.operations, "bytes": start.size_bytes}
    if rest.stuck:
        raise left_over(subject, until, ExitCode.FAILED, WITHHELD if rest.withheld else REFUSED)
    raise left_over(subject, until, ExitCode.TIMEOUT, LATE)


async def _come_to_rest(subject: Subject, until: int, tell: Report, paths: Sequence[bytes]) -> None:
    """Wait until nothing is left up to that number, or nothing that will come by itself."""
    left_at_look = -1
    while True:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch, subject, until, paths, tell, nursery.cancel_scope)
            if not await subject.persisted(until):
                # Something is parked; whether that matters here, the watch knows.
                await trio.sleep_forever()
            nursery.cancel_scope.cancel()
        await subject.decided()
        rest = subject.remaining(until, paths)
        if rest.withheld and rest.operations != left_at_look:
            # A node that came back since may not have been seen yet.
            left_at_look = rest.operations
            await subject.nodes_seen()
        elif rest.operations == 0 or rest.stuck:
            return  # else deletions that were held back are carried out now


async def _watch(
    subject: Subject, until: int, paths: Sequence[bytes], tell: Report, scope: trio.CancelScope
) -> None:
    """Tell progress; end the wait when nothing is left that will come by itself."""
    while True:
        began = subject.clock.now()
        rest = subject.remaining(until, paths)
        took_s = subject.clock.now() - began
        if rest.operations == 0 or rest.stuck:
            scope.cancel()
            return
        await tell(
            {
                "event": "progress",
                "operations": rest.operations,
                "bytes": rest.size_bytes,
                "trouble": subject.trouble(),
            }
        )
        await trio.sleep(max(PROGRESS_INTERVAL_S, PROGRESS_SHARE * took_s))


async def _tell_progress(subject: Subject, until: int, tell: Report) -> None:
    while True:
        rest = subject.remaining(until)
        await tell(
            {
                "event": "progress",
                "operations": rest.operations,
                "bytes": rest.size_bytes,
                "trouble": subject.trouble(),
            }
        )
        await trio.sleep(PROGRESS_INTERVAL_S)


async def _tell_of_life(subject: Subject, tell: Report) -> None:
    """While nothing is counted. Nothing is said of what takes no time."""
    while True:
        await trio.sleep(PROGRESS_INTERVAL_S)
        await tell({"event": "progress", "operations": 0, "bytes": 0, "trouble": subject.trouble()})


async def _still_there(subject: Subject, so_what: str) -> None:
    """Nothing good is said of files where nobody can find them.

    Raises:
        AcpfsError: the backing directory is gone, or another one lies at its path.
    """
    if problem := await subject.problem():
        raise AcpfsError(f"{problem}; {so_what}")


async def _hear_of_mappings(
    subject: Subject,
    paths: Sequence[bytes],
    deadline: float,
    tell: Report,
    *,
    waits: bool = True,
) -> None:
    """Have the kernel write back what was changed through mappings: it is being written, and nobody
    knew.

    A file of which that cannot be heard counts as one that is being written: `waits` until it can,
    or is closed.

    Raises:
        DeadlineError: not in time, which says of which file.
    """
    if not paths:
        return
    unseen: list[Unseen] = []
    is_asked = False
    # What is there at the call is looked at, whatever the deadline is: it is a question (S285).
    with trio.move_on_at(max(deadline, trio.current_time() + LOOK_S)):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_tell_of_life, subject, tell)
            while not is_asked or (unseen and waits and trio.current_time() < deadline):
                if is_asked:
                    await trio.sleep(UNSEEN_AGAIN_S)
                unseen = await subject.written_back(paths)
                is_asked = True
            nursery.cancel_scope.cancel()
        if not unseen:
            return
    if not unseen:
        raise DeadlineError("the kernel does not write back in time what was changed in mappings")
    raise DeadlineError(
        f"{unseen[0].path} is open, and nobody can tell whether it was changed through a mapping: "
        f"{unseen[0].why}"
    )


def _incomplete_now(subject: Subject, paths: Sequence[bytes]) -> dict[int, int]:
    """Files that are not complete at the paths → how often they were."""
    return {one.number: one.versions for one in subject.incomplete(paths)} if paths else {}


def still_incomplete(
    subject: Subject, paths: Sequence[bytes], at_call: dict[int, int]
) -> list[Incomplete]:
    """What was not complete at the call and has not been since.

    Raises:
        AcpfsError: some of it will not be by itself, which it says.
    """
    if not at_call:
        return []
    found = [
        one for one in subject.incomplete(paths) if at_call.get(one.number, -1) >= one.versions
    ]
    halves = [one for one in found if one.is_half]
    if halves:
        raise AcpfsError(
            f"{_first(halves)} interrupted: its writer was lost, or a write failed; "
            "`acpfs-ctl retry` stores what there is, `discard` drops it"
        )
    return found


async def _completed(
    subject: Subject, paths: Sequence[bytes], at_call: dict[int, int], tell: Report
) -> None:
    """Until nothing of that is left."""
    while True:
        began = subject.clock.now()
        left = still_incomplete(subject, paths, at_call)
        if not left:
            return
        took_s = subject.clock.now() - began
        await tell(
            {"event": "progress", "operations": len(left), "bytes": 0, "trouble": subject.trouble()}
        )
        await trio.sleep(max(PROGRESS_INTERVAL_S, PROGRESS_SHARE * took_s))


def _being_written(left: Sequence[Incomplete]) -> RemoteError:
    """That it is, and by whom."""
    first = left[0].writers
    who = ", ".join(f"process {one.pid} ({one.command or 'gone'})" for one in first)
    error = RemoteError(
        f"{_first(left)} being written, and only in RAM until its writer closes it"
        + (f": {who}" if who else ""),
        {
            "being_written": [
                {"path": one.path, "writers": [asdict(writer) for writer in one.writers]}
                for one in left[:LEFT_NAMED_MAX]
            ]
        },
    )
    error.exit_code = ExitCode.TIMEOUT
    return error


def _first(found: Sequence[Incomplete]) -> str:
    more = f" and {len(found) - 1} more are" if len(found) > 1 else " is"
    return f"{_shown(os.fsencode(found[0].path))}{more}"


def _none_interrupted(subject: Subject) -> None:
    left = subject.interrupted()
    if left:
        message = (
            "some files are not whole: they lost their writer, or a write failed; "
            "`acpfs-ctl retry` stores them as they are, `discard` drops them"
        )
        raise _left_error(left, len(left), ExitCode.FAILED, message)


def left_over(subject: Subject, until: int, code: ExitCode, message: str) -> RemoteError:
    """The error that names what is left."""
    trouble = subject.trouble() if code is ExitCode.TIMEOUT else ""
    message += f": {trouble}" if trouble else ""
    return _left_error(subject.left(until), subject.remaining(until).operations, code, message)


def _left_error(
    left: Sequence[QueueEntry], count: int, code: ExitCode, message: str
) -> RemoteError:
    error = RemoteError(
        message,
        {"left": [asdict(entry) for entry in left[:LEFT_NAMED_MAX]], "left_operations": count},
    )
    error.exit_code = code
    return error


async def _check(
    subject: Subject, paths: Sequence[bytes], tell: Report, *, every: bool = False
) -> int:
    """Verify; number of files. Without `every`, only bad verdicts are sent, and they are an
    error.
    """
    bad: list[Verification] = []
    count = 0

    async def judge(verdict: Verification) -> None:
        nonlocal count
        count += 1
        if verdict.status not in GOOD:
            bad.append(verdict)
        if every or verdict.status not in GOOD:
            await tell({"event": "items", "items": [asdict(verdict)]})

    await _still_there(subject, UNVERIFIED)
    await subject.verify(paths, judge)
    if bad and not every:
        raise AcpfsError(
            f"{len(bad)} of {count} files are not as they were written, first {bad[0].path}: "
            f"{bad[0].status}"
        )
    return count


def _left_s(deadline: float) -> float:
    return max(0.0, deadline - trio.current_time())


def _limit(timeout_s: float | None) -> float:
    return math.inf if timeout_s is None else timeout_s


def _shown(path: bytes | str) -> str:
    return path.decode(errors="backslashreplace") if isinstance(path, bytes) else path
