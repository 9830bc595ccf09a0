"""What a training process calls, against a real mount."""

import concurrent.futures
import errno
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
import trio.testing
import xxhash

from acpfs import client
from acpfs.client import asynchronous, watching
from acpfs.control import client as control_client
from acpfs.control import registry
from acpfs.control.client import Line
from acpfs.control.runtime import ENVIRONMENT_VARIABLE
from acpfs.errors import AcpfsError, ExitCode, NotMountedError
from tests.rig.mounts import AcpfsMount, MakeMount

pytestmark = [
    pytest.mark.mount,
    pytest.mark.transports("native"),
    pytest.mark.skipif(
        os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
    ),
]
BOTH = pytest.mark.transports("libfuse", "native")


@pytest.fixture
def mount(
    transport: str, tmp_path: Path, make_mount: MakeMount, monkeypatch: pytest.MonkeyPatch
) -> AcpfsMount:
    (tmp_path / "backing").mkdir()
    made = make_mount(tmp_path / "backing", transport, bandwidth="1M")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(made.runtime_dir))
    return made


def test_wait_until_a_checkpoint_is_safe(mount: AcpfsMount) -> None:
    content = os.urandom(1 << 20)
    mount.ask("set", key="bandwidth", value="1")
    (mount.path / "model.pt").write_bytes(content)
    with pytest.raises(AcpfsError) as caught:
        client.wait_persisted(mount.path / "model.pt", timeout_s=0.05)
    assert caught.value.exit_code == ExitCode.TIMEOUT
    mount.ask("set", key="bandwidth", value="0")
    client.wait_persisted(mount.path / "model.pt", timeout_s=60)
    assert (mount.backing / "model.pt").read_bytes() == content
    client.wait_verified(mount.path / "model.pt", timeout_s=60)
    client.flush(mount.path)
    assert client.status(mount.path)["queue_length"] == 0
    assert client.status()["mount"] == str(mount.path)


def test_a_path_elsewhere_is_not_ours_to_judge(mount: AcpfsMount, tmp_path: Path) -> None:
    with pytest.raises(NotMountedError):
        client.wait_persisted(tmp_path / "elsewhere")


def test_a_training_process_imports_nothing_heavy() -> None:
    code = (
        "import sys, acpfs.client; print([m for m in ('trio', 'pyfuse3', 'pydantic', 'click', "
        "'rich', 'structlog') if m in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
        ).stdout.strip()
        == "[]"
    )


def _save(mount: AcpfsMount, name: str, files: int = 3, size: int = 1 << 16) -> dict[str, bytes]:
    contents = {f"shard_{number}.bin": os.urandom(size) for number in range(files)}
    (mount.path / name).mkdir(parents=True)
    for file, content in contents.items():
        (mount.path / name / file).write_bytes(content)
    return contents


def _as_expected(
    checkpoint: client.SafeCheckpoint, mount: AcpfsMount, name: str, contents: dict[str, bytes]
) -> None:
    assert checkpoint.path == str(mount.path / name)
    found = {file.path: (file.size, file.checksum) for file in checkpoint.files}
    assert found == {
        str(mount.path / name / file): (len(content), xxhash.xxh3_128_hexdigest(content))
        for file, content in contents.items()
    }
    assert all(
        (mount.backing / name / file).read_bytes() == content for file, content in contents.items()
    )


@pytest.mark.clause("S115")
@BOTH
def test_a_callback_gets_each_safe_checkpoint_with_names_sizes_and_checksums(
    mount: AcpfsMount,
) -> None:
    told: queue.SimpleQueue[client.SafeCheckpoint] = queue.SimpleQueue()

    def safe(checkpoint: client.SafeCheckpoint) -> None:
        told.put(checkpoint)
        raise ZeroDivisionError("what a callback does is its own business")

    with client.on_persisted(mount.path / "run", safe, count=3):
        for step in (1, 2):
            contents = _save(mount, f"run/checkpoint-{step}")
            checkpoint = told.get(timeout=60)
            assert checkpoint.step == step
            _as_expected(checkpoint, mount, f"run/checkpoint-{step}", contents)
        _save(mount, "elsewhere/checkpoint-3")
        _save(mount, "run/checkpoint-4", files=2)
        client.flush(mount.path)
    assert told.empty()


@pytest.mark.transports(
    "native"
)  # with libfuse the mount is away for a moment, and what is written then is native
@pytest.mark.clause("S115")
def test_the_end_of_a_worker_is_not_noticed_and_nothing_told_twice(mount: AcpfsMount) -> None:
    safe = client.persisted_checkpoints(mount.path, count=3)
    with closing(safe), concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(next, safe)
        client.status(mount.path)
        contents = _save(mount, "checkpoint-1")
        _as_expected(first.result(timeout=60), mount, "checkpoint-1", contents)
        second = pool.submit(next, safe)
        os.kill(mount.status()["worker"]["pid"], signal.SIGKILL)
        mount.wait_status(lambda status: status["worker"]["number"] > 1)
        contents = _save(mount, "checkpoint-2")
        _as_expected(second.result(timeout=60), mount, "checkpoint-2", contents)


@pytest.mark.clause("S115")
def test_without_a_count_a_checkpoint_is_safe_when_nothing_comes_to_it_any_more(
    mount: AcpfsMount,
) -> None:
    told: queue.SimpleQueue[client.SafeCheckpoint] = queue.SimpleQueue()
    with client.on_persisted(mount.path, told.put, settle_s=0.5):
        mount.ask(
            "set", key="bandwidth", value="1"
        )  # who writes may be held up for longer than that
        contents = _save(mount, "checkpoint-1", files=5)
        mount.ask("set", key="bandwidth", value="0")
        _as_expected(told.get(timeout=60), mount, "checkpoint-1", contents)


@pytest.mark.clause("S114")
def test_wait_for_a_number_of_files(mount: AcpfsMount) -> None:
    with pytest.raises(AcpfsError, match="0 of 3 files") as caught:
        client.wait_persisted(mount.path / "run", timeout_s=0.1, count=3)
    assert caught.value.exit_code == ExitCode.TIMEOUT
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.wait_persisted, mount.path / "run", 60, count=3)
        contents = _save(mount, "run/checkpoint-1")
        waiting.result(timeout=60)
    assert all(
        (mount.backing / "run/checkpoint-1" / file).read_bytes() == content
        for file, content in contents.items()
    )
    assert mount.ctl("wait", str(mount.path / "run"), "--count", "3")["files"] == 3


@pytest.mark.clause("S115")
def test_the_same_for_trio_and_a_cancelled_wait_ends_at_once(mount: AcpfsMount) -> None:
    before = set(threading.enumerate())

    async def main() -> None:
        with trio.fail_after(90):
            with trio.move_on_after(0.2) as scope:
                await asynchronous.wait_persisted(mount.path / "never", count=1)
            assert scope.cancelled_caught
            async with asynchronous.persisted_checkpoints(mount.path, count=3) as safe:
                contents = await trio.to_thread.run_sync(_save, mount, "checkpoint-1")
                _as_expected(await safe.receive(), mount, "checkpoint-1", contents)
            await asynchronous.flush(mount.path)
            await asynchronous.wait_persisted(mount.path / "checkpoint-1", count=3)

    trio.run(main)
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name.startswith("acpfs-")]


@pytest.mark.clause("S115")
def test_a_channel_that_was_closed_is_not_told_and_nothing_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tells: list[Callable[[client.SafeCheckpoint], None]] = []

    def on_persisted(
        _directory: object, tell: Callable[[client.SafeCheckpoint], None], **_how: object
    ) -> SimpleNamespace:
        tells.append(tell)
        return SimpleNamespace(cancel=bool)

    monkeypatch.setattr(watching, "on_persisted", on_persisted)

    async def main() -> None:
        async with asynchronous.persisted_checkpoints("/mnt") as safe:
            safe.close()
            tells[0](client.SafeCheckpoint("/mnt/checkpoint-1", 1, 0, 0, (), None, None, None))
            await trio.testing.wait_all_tasks_blocked()

    trio.run(main)


def test_a_cancelled_callback_is_no_reason_for_an_alarm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = threading.Event()

    def ends_when_cut(
        _record: object, _verb: str, _args: object, _take: object, line: Line
    ) -> None:
        asked.set()
        while not line.is_cut:
            line.wait_cut(1)
        raise AcpfsError("the daemon closed the connection")

    monkeypatch.setattr(
        registry, "locate", lambda path: (SimpleNamespace(mountpoint="/mnt"), str(path))
    )
    monkeypatch.setattr(control_client, "request", ends_when_cut)
    with client.on_persisted("run", print):
        assert asked.wait(60)
    assert not caplog.records


@pytest.mark.clause("S115")
def test_only_whoever_asked_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is out of descriptors for a moment, and goes to another directory."""
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()

    def fails(_record: object, _verb: str, args: dict[str, list[str]], *_more: object) -> None:
        asked.put(args["paths"][0])
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(
        registry, "locate", lambda path: (SimpleNamespace(mountpoint="/mnt"), str(path))
    )
    monkeypatch.setattr(control_client, "request", fails)
    monkeypatch.setattr(watching, "WAIT_FOR_MOUNT_S", 0.01)
    monkeypatch.chdir(tmp_path)
    with client.on_persisted("run", print):
        assert asked.get(timeout=60) == str(tmp_path / "run")
        monkeypatch.chdir("/")
        assert {asked.get(timeout=60) for _ in range(3)} == {str(tmp_path / "run")}


@pytest.mark.clause("T186")
def test_where_its_start_is_interrupted_nobody_is_told_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal's handler raised in `Thread.start`: the callback was called for as long as the
    process lived.
    """
    started: list[threading.Thread] = []
    start = threading.Thread.start
    run = threading.Thread.run
    go = threading.Event()
    asked: list[object] = []

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        started.append(thread)
        raise KeyboardInterrupt

    def held(thread: threading.Thread) -> None:
        go.wait()
        run(thread)

    def ask(*arguments: object, **_named: object) -> None:
        asked.append(arguments)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(
        registry, "locate", lambda path: (SimpleNamespace(mountpoint="/mnt"), str(path))
    )
    monkeypatch.setattr(control_client, "request", ask)
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    monkeypatch.setattr(threading.Thread, "run", held)
    with pytest.raises(KeyboardInterrupt):
        client.on_persisted("run", print)
    go.set()
    (thread,) = started
    thread.join(60.0)
    assert not thread.is_alive()
    assert asked == []


@pytest.mark.clause("S115")
def test_what_becomes_safe_before_the_thread_runs_is_told_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = threading.Event()
    go = threading.Event()
    asked: queue.SimpleQueue[float] = queue.SimpleQueue()
    run = threading.Thread.run

    def late(thread: threading.Thread) -> None:
        if thread.name == "acpfs-persisted":
            started.set()
            go.wait()
        run(thread)

    def ask(_record: object, _verb: str, args: dict[str, float], *_more: object) -> None:
        asked.put(args["after"])

    monkeypatch.setattr(
        registry, "locate", lambda path: (SimpleNamespace(mountpoint="/mnt"), str(path))
    )
    monkeypatch.setattr(control_client, "request", ask)
    monkeypatch.setattr(threading.Thread, "run", late)
    line = Line()
    safe = client.persisted_checkpoints("run", line=line)
    with closing(safe), concurrent.futures.ThreadPoolExecutor(1) as pool:
        nothing = pool.submit(next, safe, None)
        is_late = started.wait(60)
        becomes_safe = time.monotonic()
        go.set()
        after = asked.get(timeout=60)
        line.cut()
        assert nothing.result(timeout=60) is None
    assert is_late
    assert after < becomes_safe
