"""What the verbs say where nothing good can be said: of paths that are not there, over a backing
directory that is gone.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import trio

from acpfs.control import verbs
from acpfs.control.registry import MountRecord
from acpfs.control.reports import OpenWriter
from acpfs.control.socket_messages import RemoteDeadlineError
from acpfs.control.worker_contract import Incomplete, Unseen
from acpfs.drain_records import Verification
from acpfs.errors import AcpfsError, DeadlineError, ExitCode
from tests.control.double import DoubleSubject
from tests.control.test_server import ask, serve


@pytest.mark.clause("S219")
@pytest.mark.parametrize(
    ("verb", "args"),
    [("wait", {}), ("wait", {"verified": True}), ("flush", {}), ("verify", {}), ("repair", {})],
)
def test_nothing_good_is_said_over_a_backing_directory_that_is_gone(
    tmp_path: Path, verb: str, args: dict[str, Any]
) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        subject.gone = "/b shows another volume"
        with pytest.raises(AcpfsError, match=r"^/b shows another volume; ") as caught:
            await ask(record, verb, {"paths": ["a"], **args})
        assert caught.value.exit_code is ExitCode.FAILED

    serve(tmp_path, scenario)


@pytest.mark.clause("S219")
def test_who_waits_for_a_backing_directory_that_is_gone_is_told_what_for(tmp_path: Path) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        subject.ops = [(1, "a", 5, False)]
        subject.gone = "/b cannot be opened"
        events: list[Any] = []
        for timeout_s in (0.05, 60):  # a machine that stands still may take all of a short time
            if not events:
                with pytest.raises(
                    TimeoutError,
                    match=r"^not everything is persisted in time: /b cannot be opened$",
                ):
                    await ask(record, "flush", {"timeout_s": timeout_s}, events)
        assert events[0]["trouble"] == "/b cannot be opened"

    serve(tmp_path, scenario)


@pytest.mark.clause("S219")
def test_a_mount_over_a_backing_directory_that_is_gone_can_be_unmounted_and_says_so(
    tmp_path: Path,
) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        subject.gone = "/b cannot be opened"
        assert (await ask(record, "unmount"))["problem"] == "/b cannot be opened"

    serve(tmp_path, scenario)


@pytest.mark.clause("S217")
@pytest.mark.parametrize(
    ("verb", "args"),
    [("wait", {}), ("wait", {"verified": True}), ("flush", {}), ("verify", {}), ("repair", {})],
)
def test_nothing_can_be_said_of_what_is_not_there(
    tmp_path: Path, verb: str, args: dict[str, Any]
) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        subject.absent = {b"x", b"y\xff"}
        with pytest.raises(AcpfsError) as caught:
            await ask(record, verb, {"paths": ["a", "x", os.fsdecode(b"y\xff")], **args})
        assert str(caught.value) == "no such file or directory in the mount: x, y\\xff"
        assert caught.value.exit_code is ExitCode.FAILED
        await ask(record, verb, {"paths": ["a"], **args})

    serve(tmp_path, scenario)


@pytest.mark.clause("S217")
def test_what_is_recorded_and_gone_is_missing_and_not_unheard_of(tmp_path: Path) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        subject.absent = {b"x"}
        subject.verdicts = [Verification("x", "missing")]
        assert [
            item["status"] for item in (await ask(record, "verify", {"paths": ["x"]}))["items"]
        ] == ["missing"]

    serve(tmp_path, scenario)


@pytest.mark.clause("S217")
def test_a_backing_directory_that_does_not_say_is_told_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        subject.stuck = True
        with pytest.raises(TimeoutError, match="does not say whether there is a"):
            await ask(record, "wait", {"paths": ["a"], "timeout_s": 0.05})

    monkeypatch.setattr(verbs, "LOOK_S", 0.01)
    serve(tmp_path, scenario)


@pytest.mark.clause("S475")
def test_nothing_good_is_said_of_what_may_have_been_changed_through_a_mapping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbs, "LOOK_S", 60.0)

    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        subject.unseen_rows = [Unseen("a", "Permission denied")]
        for verb, timeout_s in (("wait", 0.0), ("flush", None), ("flush", 0.0)):
            with pytest.raises(DeadlineError, match=r"^a is open, .* mapping: Permission denied$"):
                await ask(record, verb, {"paths": ["a"], "timeout_s": timeout_s})
        await ask(record, "flush", {"timeout_s": 60})
        await ask(record, "wait", {"paths": ["b"], "timeout_s": 60})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, record, "wait", {"paths": ["a"]})
            subject.when_looked_for_pages = subject.unseen_rows.clear

    serve(tmp_path, scenario)


@pytest.mark.clause("S475", "S285")
def test_a_kernel_that_does_not_write_back_is_waited_for_as_long_as_one_likes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        subject.holds_pages = True
        for verb in ("wait", "flush"):
            with pytest.raises(TimeoutError, match="does not write back in time"):
                await ask(record, verb, {"paths": ["a"], "timeout_s": 0.0})

    monkeypatch.setattr(verbs, "LOOK_S", 0.01)
    serve(tmp_path, scenario)


FILE = Incomplete(7, "a", is_half=False, is_stored_log=False, versions=1)
WRITTEN = r"^a is being written, and only in RAM until its writer closes it$"


@pytest.mark.clause("S392")
@pytest.mark.parametrize(
    ("verb", "args"),
    [("wait", {"timeout_s": 0}), ("wait", {"verified": True, "timeout_s": 0.05}), ("flush", {})],
)
def test_what_is_being_written_is_not_persisted(
    tmp_path: Path, verb: str, args: dict[str, Any]
) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        subject.incomplete_rows = [FILE]
        with pytest.raises(DeadlineError, match=WRITTEN):
            await ask(record, verb, {"paths": ["a"], **args})
        await ask(record, verb, {"paths": ["b"], **args, "timeout_s": 60})

    serve(tmp_path, scenario)


@pytest.mark.clause("S392")
@pytest.mark.parametrize("verb", ["wait", "flush"])
def test_who_writes_it_is_named(tmp_path: Path, verb: str) -> None:
    writers = (OpenWriter(7, "dd"), OpenWriter(8, None))

    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        subject.incomplete_rows = [FILE._replace(writers=writers)]
        with pytest.raises(
            RemoteDeadlineError, match=r": process 7 \(dd\), process 8 \(gone\)$"
        ) as e:
            await ask(record, verb, {"paths": ["a"], "timeout_s": 0})
        assert e.value.details["being_written"] == [
            {
                "path": "a",
                "writers": [{"pid": 7, "command": "dd"}, {"pid": 8, "command": None}],
            }
        ]

    serve(tmp_path, scenario)


@pytest.mark.clause("S392")
@pytest.mark.parametrize(
    "now",
    [[], [FILE._replace(versions=2)], [FILE._replace(number=8)]],
    ids=["closed", "closed, and written anew", "replaced by another one"],
)
def test_who_waits_waits_for_the_close(tmp_path: Path, now: list[Incomplete]) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        subject.incomplete_rows = [FILE]
        looked = 0

        def look() -> None:
            nonlocal looked
            looked += 1
            if looked == 4:  # at the call, after the drain, and while it waits
                subject.incomplete_rows = now

        subject.when_looked = look
        await ask(record, "wait", {"paths": ["a"], "timeout_s": 60})
        assert looked >= 4

    serve(tmp_path, scenario)


@pytest.mark.clause("S392")
@pytest.mark.parametrize(
    ("verb", "args"),
    [("wait", {}), ("wait", {"verified": True}), ("wait", {"count": 1}), ("flush", {})],
)
def test_what_lost_its_writer_will_not_be_persisted_by_itself(
    tmp_path: Path, verb: str, args: dict[str, Any]
) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        subject.incomplete_rows = [FILE._replace(is_half=True)]
        for timeout_s in (0, None):
            with pytest.raises(AcpfsError, match=r"^a is interrupted: ") as caught:
                await ask(record, verb, {"paths": ["a"], "timeout_s": timeout_s, **args})
            assert caught.value.exit_code is ExitCode.FAILED

    serve(tmp_path, scenario)


@pytest.mark.clause("S392")
def test_a_log_of_which_there_is_a_version_keeps_no_flush_from_its_end(tmp_path: Path) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        subject.incomplete_rows = [FILE._replace(is_stored_log=True)]
        await ask(record, "flush", {"paths": ["a"]})
        with pytest.raises(DeadlineError, match=WRITTEN):
            await ask(record, "wait", {"paths": ["a"], "timeout_s": 0})

    serve(tmp_path, scenario)
