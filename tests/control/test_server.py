"""The control socket: answers, refuses, and survives whatever a client does."""

import json
import os
import socket
import stat
import struct
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from acpfs.control import client, server
from acpfs.control.registry import MountRecord, process_started
from acpfs.control.reports import FileState
from acpfs.control.server import ControlServer
from acpfs.control.socket_messages import ControlRequest, Json
from acpfs.control.verbs import answers
from acpfs.control.worker_contract import Report
from acpfs.drain_records import GuardedReport, QueueEntry, Verification
from acpfs.errors import (
    AcpfsError,
    ConfigError,
    DeadlineError,
    ExitCode,
    NotMountedError,
    RefusedError,
)
from tests.control.double import DoubleSubject, report_of, socket_of

TEST_LIMIT_S = 120

Scenario = Callable[[DoubleSubject, MountRecord], Awaitable[None]]


def serve(
    tmp_path: Path, scenario: Scenario, subject: DoubleSubject | None = None, **options: Any
) -> ControlServer:
    """Run a scenario beside a server."""
    kept: list[ControlServer] = []

    async def main() -> None:
        with trio.fail_after(TEST_LIMIT_S):
            subj = subject or DoubleSubject()
            control = ControlServer(tmp_path / "c.sock", answers(subj), **options)
            kept.append(control)
            async with trio.open_nursery() as nursery:
                await nursery.start(control.run)
                with socket_of(control) as record:
                    await scenario(subj, record)
                nursery.cancel_scope.cancel()

    trio.run(main)
    return kept[0]


async def ask(
    record: MountRecord,
    verb: str,
    args: dict[str, Any] | None = None,
    events: list[Any] | None = None,
) -> Any:
    return await trio.to_thread.run_sync(
        partial(client.request, record, verb, args, None if events is None else events.append)
    )


async def raw(record: MountRecord, data: bytes, *, half_close: bool = True) -> list[dict[str, Any]]:
    """Send bytes as they are; the answers until the server hangs up."""
    async with await trio.open_unix_socket(record.socket) as stream:
        await stream.send_all(data)
        if half_close:
            await stream.send_eof()
        received = b"".join([chunk async for chunk in stream])
    return [json.loads(line) for line in received.splitlines()]


def test_status_config_and_metrics(tmp_path: Path) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        status = await ask(record, "status")
        assert status["mount"] == "/mnt/x"
        assert status["ram"]["budget_bytes"] == 10
        assert (await ask(record, "config")) == {"streams": 8}
        assert "acpfs_ram_used_bytes" in (await ask(record, "metrics"))["text"]

    serve(tmp_path, scenario)


@pytest.mark.parametrize(
    ("state", "ready"), [("serving", True), ("draining", False), ("bypassed", False)]
)
def test_a_probe_is_told_whether_the_mount_serves(tmp_path: Path, state: str, ready: bool) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        subject.state = state
        assert await ask(record, "ready") == {"ready": ready, "state": state}

    serve(tmp_path, scenario)


@pytest.mark.clause("S620")
def test_it_says_whether_it_has_answered_what_it_answers_at_once(tmp_path: Path) -> None:
    """A worker that makes room waits for that; not for who waits for something."""
    going_on = trio.Event()
    begun = {"flush": trio.Event(), "reload": trio.Event()}
    said: list[bool] = []

    async def halted(request: ControlRequest, _tell: Report) -> Json:
        begun[request.verb].set()
        await going_on.wait()
        return {}

    async def main() -> None:
        with trio.fail_after(TEST_LIMIT_S):
            control = ControlServer(tmp_path / "c.sock", dict.fromkeys(begun, halted))
            async with trio.open_nursery() as nursery:
                await nursery.start(control.run)
                with socket_of(control) as record:
                    async with trio.open_nursery() as clients:
                        clients.start_soon(ask, record, "flush", {"paths": []})
                        await begun["flush"].wait()
                        said.append(control.is_answering)
                        clients.start_soon(ask, record, "reload")
                        await begun["reload"].wait()
                        said.append(control.is_answering)
                        going_on.set()
                await wait_all_tasks_blocked()  # the client hears before its place is free
                said.append(control.is_answering)
                nursery.cancel_scope.cancel()

    trio.run(main)
    assert said == [False, True, False]


def test_the_socket_is_for_its_owner(tmp_path: Path) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        assert stat.S_IMODE(os.stat(record.socket).st_mode) == 0o600

    serve(tmp_path, scenario)


def test_a_control_group_opens_it_to_the_group(tmp_path: Path) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        assert stat.S_IMODE(os.stat(record.socket).st_mode) == 0o660

    import grp

    serve(tmp_path, scenario, group=grp.getgrgid(os.getgid()).gr_name)


def test_an_unknown_group_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no-such-group"):
        ControlServer(tmp_path / "c.sock", {}, "no-such-group")


def test_a_stranger_is_refused_whatever_the_sockets_mode_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stranger(struct.Struct):
        def unpack(self, _buffer: Any) -> tuple[Any, ...]:
            return (1, 12345, 12345)

    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        with pytest.raises(AcpfsError, match="permission denied"):
            await ask(record, "status")

    monkeypatch.setattr(server, "_PEERCRED", Stranger("3i"))
    assert serve(tmp_path, scenario).refused_clients == 1


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
@pytest.mark.parametrize(
    ("member", "verb"), [(True, "config"), (True, "discard"), (True, "bypass"), (False, "config")]
)
def test_group_members_may_ask_by_their_supplementary_groups(
    tmp_path: Path, member: bool, verb: str
) -> None:
    import grp

    group = next(g for g in grp.getgrall() if g.gr_gid not in os.getgroups() and g.gr_gid != 0)
    for parent in (tmp_path, *tmp_path.parents[:3]):
        if parent != Path("/tmp"):
            parent.chmod(0o755)

    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        os.chmod(record.socket, 0o666)
        code = (
            "import contextlib,os,socket,sys;os.setgroups([int(x) for x in "
            "sys.argv[2:]]);os.setgid(54321);os.setuid(54321);"
            "s=socket.socket(socket.AF_UNIX);s.connect(sys.argv[1])\n"
            f'with contextlib.suppress(BrokenPipeError): s.sendall(b\'{{"verb":"{verb}"}}\\n\')\n'
            "print(s.recv(65536).decode())"
        )
        groups = [str(group.gr_gid)] if member else []
        done = await trio.run_process(
            ["python3", "-c", code, record.socket, *groups], capture_stdout=True
        )
        answer = json.loads(done.stdout)
        assert ("result" in answer) is (member and verb == "config")
        assert ("permission denied" in str(answer)) is not (member and verb == "config")

    serve(tmp_path, scenario, group=group.gr_name)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"hello\n", "not a line of JSON"),
        (b"\xff\xfe\n", "not a line of JSON"),
        (b"[1]\n", "a request is"),
        (b"{}\n", "a request is"),
        (b'{"verb": 3}\n', "a request is"),
        (b'{"verb": "status", "args": []}\n', "a request is"),
        (b'{"verb": "explode"}\n', "no such verb"),
        (b'{"verb": "wait"}\n', "at least one path"),
        (b'{"verb": "flush", "args": {"paths": "x"}}\n', "list of strings"),
        (b'{"verb": "flush", "args": {"paths": ["../x"]}}\n', "not a path below"),
        (b'{"verb": "flush", "args": {"paths": ["/etc"]}}\n', "not a path below"),
        (b'{"verb": "flush", "args": {"paths": ["a\\u0000b"]}}\n', "not a path below"),
        (b'{"verb": "flush", "args": {"timeout_s": -1}}\n', "number of seconds"),
        (b'{"verb": "flush", "args": {"timeout_s": NaN}}\n', "number of seconds"),
        (b'{"verb": "flush", "args": {"timeout_s": true}}\n', "number of seconds"),
        (b'{"verb": "set", "args": {"key": "streams"}}\n', "value must be a string"),
        (b'{"verb": "retry", "args": {"paths": []}}\n', "exactly one path"),
        pytest.param(
            b'{"verb": "discard", "args": {"paths": ["a"], "older_than_s": 60}}\n',
            "has no 'older_than_s'",
            marks=pytest.mark.clause("S527"),
        ),
        (b"[" * 100_000 + b"\n", "not a line of JSON"),
        (b'{"verb": "status"', "ended before its line"),
        (b"x" * ((1 << 20) + 70_000), "at most"),
    ],
)
def test_a_malformed_request_is_answered_and_hurts_nobody(
    tmp_path: Path, data: bytes, said: str
) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        try:
            (answer,) = await raw(record, data)
        except trio.BrokenResourceError:
            assert len(data) > 1 << 20  # told while still sending
        else:
            assert said in answer["error"]["message"]
            assert answer["error"]["exit_code"] == ExitCode.USAGE
        assert (await ask(record, "config")) == {"streams": 8}

    serve(tmp_path, scenario)


def test_a_bug_in_a_verb_is_answered_and_the_server_goes_on(tmp_path: Path) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        subject.broken = True
        with pytest.raises(AcpfsError, match="ZeroDivisionError"):
            await ask(record, "status")
        subject.broken = False
        await ask(record, "status")

    serve(tmp_path, scenario)


def test_a_client_that_goes_away_ends_its_request(tmp_path: Path) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        subject.ops = [(1, "a", 5, False)]
        gone = trio.Event()

        async def persisted(until: int) -> bool:
            try:
                await trio.sleep_forever()
            finally:
                gone.set()

        subject.persisted = persisted  # type: ignore[method-assign]
        stream = await trio.open_unix_socket(record.socket)
        await stream.send_all(b'{"verb": "flush"}\n')
        await stream.receive_some(10)
        await stream.aclose()
        await gone.wait()

    serve(tmp_path, scenario)


def test_a_silent_client_is_hung_up_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        assert await raw(record, b"", half_close=False) == []

    monkeypatch.setattr(server, "REQUEST_WAIT_S", 0.05)
    serve(tmp_path, scenario)


def test_flush_tells_progress_and_returns_when_persisted(tmp_path: Path) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        subject.ops = [(1, "a", 5, False), (2, "b", 7, False)]
        events: list[Any] = []
        subject_told = trio.Event()
        real = subject.remaining

        def remaining(until: int, paths: Any = ()) -> Any:
            if events:
                subject_told.set()
            return real(until, paths)

        subject.remaining = remaining  # type: ignore[method-assign]

        async def persist_when_told() -> None:
            await subject_told.wait()
            subject.ops.append((3, "later", 1, False))
            subject.done(1)
            subject.done(2)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(persist_when_told)
            done = await ask(record, "flush", {}, events)
        assert done == {"operations": 2, "bytes": 12, "guarded": []}
        assert events[0] == {"event": "progress", "operations": 2, "bytes": 12, "trouble": ""}

    serve(tmp_path, scenario)


@pytest.mark.clause("S215")
def test_flush_not_in_time_names_what_is_left(tmp_path: Path) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        subject.ops = [(1, "a", 5, False)]
        with pytest.raises(TimeoutError) as timeout:
            await ask(record, "flush", {"timeout_s": 0.05})
        assert isinstance(timeout.value, DeadlineError)
        assert str(timeout.value) == "not everything is persisted in time"
        with pytest.raises(AcpfsError) as caught:
            await ask(record, "flush", {"timeout_s": 0.05})
        assert caught.value.exit_code == ExitCode.TIMEOUT
        assert [entry["name"] for entry in caught.value.details["left"]] == ["a"]  # type: ignore[attr-defined]

    serve(tmp_path, scenario)


def test_flush_does_not_wait_for_what_is_refused_for_good(tmp_path: Path) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        subject.ops = [(1, "a", 5, True)]
        with pytest.raises(AcpfsError, match="refused") as caught:
            await ask(record, "flush")
        assert caught.value.exit_code == ExitCode.FAILED
        assert (await ask(record, "wait", {"paths": ["b"]}))["operations"] == 0

    serve(tmp_path, scenario)


@pytest.mark.clause("S161")
def test_flush_looks_at_the_nodes_once_more_before_it_says_that_one_is_missing(
    tmp_path: Path,
) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        subject.ops = [(1, "latest", 5, True)]
        subject.withheld = True
        with pytest.raises(AcpfsError, match="pointer files are withheld") as caught:
            await ask(record, "flush")
        assert caught.value.exit_code == ExitCode.FAILED
        subject.when_seen = lambda: subject.done(1)  # it is back, and drains
        assert (await ask(record, "flush"))["operations"] == 1

    serve(tmp_path, scenario)


@pytest.mark.clause("S161")
def test_flush_that_gets_stuck_again_looks_again(tmp_path: Path) -> None:
    """Found by review: in a drain that goes on for long, the look at its beginning knew nothing of
    a node that came back later.
    """

    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        def first() -> None:
            subject.when_seen = lambda: subject.done(2)
            subject.done(1)

        subject.ops = [(1, "a", 5, True), (2, "latest", 5, True)]
        subject.withheld = True
        subject.when_seen = first
        assert (await ask(record, "flush"))["operations"] == 2

    serve(tmp_path, scenario)


def test_wait_for_a_path_is_not_held_up_by_what_is_parked_elsewhere(tmp_path: Path) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        subject.ops = [(1, "parked", 5, True), (2, "b", 5, False)]

        async def persist() -> None:
            await trio.sleep(0.05)
            subject.done(2)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(persist)
            await ask(record, "wait", {"paths": ["b"]})

    serve(tmp_path, scenario)


@pytest.mark.clause("S590", "S618")
def test_waiting_for_a_copy_tells_progress_all_the_while(tmp_path: Path) -> None:
    """A client takes a daemon that says nothing for a minute for one that has a fault."""

    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        subject.ops = [(1, "a", 5, False)]

        class Heard(list[Any]):
            def append(self, event: Any) -> None:
                super().append(event)
                if len(self) == 3:
                    subject.when_copied.set_result(None)

        events = Heard()
        words = {"paths": ["a"], "copied": True}
        answer = await ask(record, "wait", words, events)
        assert answer == {"operations": 1, "bytes": 5, "state": "copied"}
        assert {one["event"] for one in events} == {"progress"}
        # with no time at all it is a question
        assert await ask(record, "wait", {**words, "timeout_s": 0.0}) == answer
        subject.when_copied = Future()
        with pytest.raises(AcpfsError, match="neither copied nor persisted") as caught:
            await ask(record, "wait", {**words, "timeout_s": 0.0})
        assert caught.value.exit_code == ExitCode.TIMEOUT

    serve(tmp_path, scenario)


def test_wait_verified_reads_back(tmp_path: Path) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        subject.verdicts = [Verification("a", "ok"), Verification("new", "unknown")]
        assert (await ask(record, "wait", {"paths": ["a"], "verified": True}))["verified"] == 2
        subject.verdicts.append(Verification("b", "mismatch", 1, "x", "y"))
        with pytest.raises(
            AcpfsError, match="1 of 3 files are not as they were written, first b: mismatch"
        ):
            await ask(record, "wait", {"paths": ["a"], "verified": True})

    serve(tmp_path, scenario)


def test_ls_streams_many_files_in_order(tmp_path: Path) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        subject.file_rows = [
            FileState(f"f{n:05}\udcff", 1, "clean", "libfuse", "ram", None, None, 0.0)
            for n in range(1234)
        ]
        files = (await ask(record, "ls"))["items"]
        assert [file["path"] for file in files] == [row.path for row in subject.file_rows]
        subject.file_rows = []
        assert (await ask(record, "ls"))["items"] == []

    serve(tmp_path, scenario)


def test_unmount_drains_first_and_ends(tmp_path: Path) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        assert (await ask(record, "unmount"))["left"] == []
        assert subject.unmounted.is_set()

    serve(tmp_path, scenario)


def held(path: str) -> GuardedReport:
    return GuardedReport(path, None, 4, 3, 300, 1.0, 1801.0, "no newer checkpoint lies beside it")


def test_unmount_names_what_is_held_back_and_that_is_no_failure(tmp_path: Path) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        subject.guarded_rows = [held("run/checkpoint-1")]
        done = await ask(record, "unmount")
        assert [(entry["name"], entry["state"]) for entry in done["guarded"]] == [
            ("run/checkpoint-1", "guarded")
        ]
        assert (done["left"], done["left_operations"]) == ([], 0)

    serve(tmp_path, scenario)


def test_release_lets_go_below_paths_or_all(tmp_path: Path) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        subject.guarded_rows = [
            held("a/checkpoint-1"),
            held("b/checkpoint-1"),
            held("b/checkpoint-2"),
        ]
        assert [row["path"] for row in (await ask(record, "flush"))["guarded"]] == [
            "a/checkpoint-1",
            "b/checkpoint-1",
            "b/checkpoint-2",
        ]
        assert await ask(record, "release", {"paths": ["a", "none"]}) == {"checkpoints": 1}
        assert await ask(record, "release") == {"checkpoints": 2}
        assert await ask(record, "release") == {"checkpoints": 0}

    serve(tmp_path, scenario)


@pytest.mark.parametrize("leave", [True, False])
def test_unmount_not_in_time_keeps_the_mount_unless_told_to_leave(
    tmp_path: Path, leave: bool
) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        subject.ops = [(1, "a", 5, False)]
        if leave:
            assert (await ask(record, "unmount", {"timeout_s": 0.02, "leave": True}))[
                "left_operations"
            ] == 1
        else:
            with pytest.raises(AcpfsError) as caught:
                await ask(record, "unmount", {"timeout_s": 0.02})
            assert caught.value.exit_code == ExitCode.TIMEOUT
        assert subject.unmounted.is_set() is leave

    serve(tmp_path, scenario)


def test_unmount_with_interrupted_files_keeps_the_mount(tmp_path: Path) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        subject.lost = [QueueEntry(0, "half", "store", 3, "interrupted", 1.0)]
        with pytest.raises(AcpfsError, match="lost their writer"):
            await ask(record, "unmount")
        assert not subject.unmounted.is_set()

    serve(tmp_path, scenario)


def test_unmount_in_use_is_refused(tmp_path: Path) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        subject.busy = True
        with pytest.raises(RefusedError, match="in use"):
            await ask(record, "unmount")

    serve(tmp_path, scenario)


def test_errors_keep_their_kind_over_the_wire(tmp_path: Path) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        with pytest.raises(ConfigError, match="ram cannot"):
            await ask(record, "set", {"key": "ram", "value": "1"})
        assert await ask(record, "set", {"key": "streams", "value": "3"}) == {
            "key": "streams",
            "value": 3,
        }
        with pytest.raises(AcpfsError, match="nothing of that name"):
            await ask(record, "discard", {"paths": ["x"]})

    serve(tmp_path, scenario)
    assert DeadlineError.exit_code is ExitCode.TIMEOUT


def test_a_stale_socket_is_replaced_and_a_long_path_works(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    stale = socket.socket(socket.AF_UNIX)
    fd = os.open(deep, os.O_PATH)
    stale.bind(f"/proc/self/fd/{fd}/c.sock")
    stale.close()
    os.close(fd)

    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        assert len(record.socket) > 108
        await ask(record, "status")

    serve(deep, scenario)


def test_no_daemon_is_not_mounted(tmp_path: Path) -> None:
    record = MountRecord(
        "/mnt/x", "/b", "n", 2**22 + 1, 5, str(tmp_path / "none"), "0", str(tmp_path)
    )
    with pytest.raises(NotMountedError, match="is gone; what it had not persisted is kept"):
        client.request(record, "status")


def test_a_daemon_that_ends_without_an_answer_is_told(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "c.sock"))
    listener.listen()

    async def main() -> None:
        record = MountRecord(
            "/mnt/x", "/b", "n", 1, 0, str(tmp_path / "c.sock"), "0", str(tmp_path)
        )

        async def hang_up() -> None:
            connection, _ = await trio.to_thread.run_sync(listener.accept)
            connection.recv(100)
            connection.close()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hang_up)
            with pytest.raises(AcpfsError, match="ended before it answered"):
                await ask(record, "status")

    trio.run(main)
    listener.close()


@pytest.mark.clause("S19")
def test_a_worker_that_is_killed_in_the_middle_of_an_answer_is_asked_again(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "c.sock"))
    listener.listen()

    async def main() -> None:
        record = MountRecord(
            "/mnt/x",
            "/b",
            "n",
            os.getpid(),
            process_started(os.getpid()),
            str(tmp_path / "c.sock"),
            "0",
            str(tmp_path),
        )

        asked: list[Any] = []

        async def answer() -> None:
            for said in (b'{"event": "items", "items": [1', b'{"result": {"items": []}}\n'):
                connection, _ = await trio.to_thread.run_sync(listener.accept)
                asked.append(json.loads(connection.recv(1000)))
                connection.sendall(said)
                connection.close()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer)
            assert await ask(record, "flush", {"timeout_s": 30}) == {"items": []}
        first, second = (question["args"]["timeout_s"] for question in asked)
        assert first == 30
        assert second < 30, "the time that it was given is one, however many workers it takes"

    trio.run(main)
    listener.close()


def test_watching_tells_each_safe_checkpoint_once_and_again_when_it_has_changed(
    tmp_path: Path,
) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        subject.reports = [
            report_of("a", 2),
            report_of("small", 1),
            report_of("b", 2, state="persisting"),
            report_of("old", 2, persisted_at=1.0),
        ]
        events: list[Any] = []
        line = client.Line()
        came = trio.Event()
        token = trio.lowlevel.current_trio_token()

        def take(event: Any) -> None:
            events.append(event)
            token.run_sync_soon(came.set)

        async def watch() -> None:
            args = {"count": 2, "after": 2.0}
            with pytest.raises(AcpfsError):
                await trio.to_thread.run_sync(
                    partial(client.request, record, "watch", args, take, line)
                )

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await came.wait()
            assert [(e["checkpoint"]["path"], [f["path"] for f in e["files"]]) for e in events] == [
                ("a", ["a/0", "a/1"])
            ]
            came = trio.Event()
            subject.reports[0] = report_of("a", 3)
            subject.settled += 1
            await came.wait()
            assert [e["checkpoint"]["files"] for e in events] == [2, 3]
            line.cut()

    serve(tmp_path, scenario)


@pytest.mark.clause("S629")
@pytest.mark.parametrize("verb", ["wait", "flush", "verify"])
def test_who_waits_for_a_backing_directory_that_hangs_hears_that_the_daemon_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """What is asked of it counts nothing that could be told."""
    monkeypatch.setattr(server, "ALIVE_INTERVAL_S", 0.01)

    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        subject.stuck = True
        question = json.dumps({"verb": verb, "args": {"paths": ["a"]}}).encode() + b"\n"
        async with await trio.open_unix_socket(record.socket) as stream:
            await stream.send_all(question)
            received = b""
            while received.count(b"\n") < 3:
                received += await stream.receive_some()
        told = [json.loads(line) for line in received.splitlines()[:3]]
        assert told == 3 * [{"event": "alive"}]

    serve(tmp_path, scenario)


@pytest.mark.clause("S442")
def test_a_request_that_waits_for_nothing_and_hangs_does_not_say_that_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So its command ends by the silence."""
    monkeypatch.setattr(server, "ALIVE_INTERVAL_S", 0.01)
    received = []

    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        async def hang(_reason: str) -> None:
            await trio.sleep_forever()

        monkeypatch.setattr(subject, "bypass", hang)
        async with await trio.open_unix_socket(record.socket) as stream:
            await stream.send_all(b'{"verb": "bypass", "args": {"reason": "a test"}}\n')
            with trio.move_on_after(0.3):
                received.append(await stream.receive_some())

    serve(tmp_path, scenario)
    assert received == []


def test_that_the_daemon_lives_is_no_event_for_who_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "ALIVE_INTERVAL_S", 0.01)

    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        events: list[Any] = []
        subject.persisted_rows = (2, 2)
        question = {"paths": ["a"], "count": 3, "timeout_s": 0.5}
        with pytest.raises(AcpfsError, match="2 of 3 files"):
            await ask(record, "wait", question, events)
        assert {event["event"] for event in events} <= {"progress"}

    serve(tmp_path, scenario)


def test_waiting_for_files_that_never_come_ends_with_what_there_is(tmp_path: Path) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        subject.persisted_rows = (2, 2)
        with pytest.raises(AcpfsError, match="2 of 3 files") as caught:
            await ask(record, "wait", {"paths": ["a"], "count": 3, "timeout_s": 0.0})
        assert caught.value.exit_code == ExitCode.TIMEOUT
        assert await ask(record, "wait", {"paths": ["a"], "count": 2}) == {"files": 2}
        subject.ops = [(1, "a", 1, True)]
        subject.persisted_rows = (2, 3)
        with pytest.raises(AcpfsError) as caught:
            await ask(record, "wait", {"paths": ["a"], "count": 2})
        assert caught.value.exit_code == ExitCode.FAILED
        with pytest.raises(AcpfsError, match="count must be"):
            await ask(record, "wait", {"paths": ["a"], "count": -1})

    serve(tmp_path, scenario)


@pytest.mark.clause("S443")
def test_what_was_tried_again_meanwhile_is_not_called_late(tmp_path: Path) -> None:
    """Nothing was left that would come by itself; then somebody mended the cause, while the
    manifest was awaited.
    """
    subject = DoubleSubject()
    subject.ops = [(1, "f", 5, True)]

    mended = trio.Event()

    def mend() -> None:
        if not mended.is_set():
            subject.ops = [(1, "f", 5, False)]
            mended.set()

    subject.when_recorded = mend

    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(persist, subject)
            assert (await ask(record, "flush", {"timeout_s": TEST_LIMIT_S}))["operations"] == 1

    async def persist(subject: DoubleSubject) -> None:
        await mended.wait()
        subject.done(1)

    serve(tmp_path, scenario, subject)


@pytest.mark.clause("S443")
def test_a_socket_that_was_removed_is_made_anew(tmp_path: Path) -> None:
    """With its directory, as a cleaner does; what was asked before goes on."""
    directory = tmp_path / "sockets"
    directory.mkdir()

    async def main() -> None:
        with trio.fail_after(TEST_LIMIT_S):
            subject = DoubleSubject()
            subject.ops = [(1, "f", 5, False)]
            control = ControlServer(directory / "c.sock", answers(subject))
            async with trio.open_nursery() as nursery:
                await nursery.start(control.run)
                with socket_of(control) as record:
                    await remove_and_ask(control, subject, record)
                nursery.cancel_scope.cancel()

    async def remove_and_ask(
        control: ControlServer, subject: DoubleSubject, record: MountRecord
    ) -> None:
        assert not control.listen_again()
        async with trio.open_nursery() as asking:
            asking.start_soon(ask, record, "flush")
            await wait_all_tasks_blocked(0.1)
            (directory / "c.sock").unlink()
            directory.rmdir()
            assert control.listen_again()
            assert (await ask(record, "ready"))["ready"]
            subject.done(1)

    trio.run(main)
