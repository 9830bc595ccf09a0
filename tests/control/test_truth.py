"""What the verbs say where nothing good can be said: of paths that are not there, over a backing directory that is gone."""

import os
from pathlib import Path
from typing import Any

import pytest

from acpfs.control import verbs
from acpfs.control.registry import MountRecord
from acpfs.drain_records import Verification
from acpfs.errors import AcpfsError, ExitCode
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
        subject.ops, subject.gone = [(1, "a", 5, False)], "/b cannot be opened"
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
        subject.absent, subject.verdicts = {b"x"}, [Verification("x", "missing")]
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
