"""A mount from its start to its end, through the commands: ready, refused, drained, killed, found
again.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from acpfs.client import Durability, durability
from acpfs.errors import ExitCode, NotMountedError
from acpfs.ram.mounts import clone, mounted_at
from acpfs.worker.worker import SESSION_ENDS_VARIABLE
from tests.rig.faultfs import FaultFs
from tests.rig.mounts import (
    REPOSITORY,
    AcpfsMount,
    CommandError,
    MakeMount,
    is_mounted,
    mounts_below,
    tell_again,
    wait_gone,
)
from tests.rig.namespaces import namespace
from tests.rig.processes import stop_processes

pytestmark = [
    pytest.mark.mount,
    pytest.mark.transports("native"),
    pytest.mark.skipif(
        os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
    ),
]
BOTH = pytest.mark.transports("libfuse", "native")

MIB = 1 << 20

STATUS_FIELDS = {
    "mount": str,
    "backing": str,
    "node": str,
    "transport": str,
    "lanes": dict,
    "worker": dict,
    "ram": dict,
    "queue": list,
    "oldest_unpersisted_age_s": float,
    "backing_health": dict,
    "counters": dict,
}
RAM_FIELDS = {"budget_bytes", "used_bytes", "dirty_bytes", "clean_bytes", "reserved_bytes"}
QUEUE_FIELDS = {"name", "size", "state", "tries", "last_error", "next_attempt"}


@pytest.fixture
def backing(tmp_path: Path) -> Path:
    path = tmp_path / "backing"
    path.mkdir()
    return path


@pytest.fixture
def slow(make_mount: MakeMount, transport: str, backing: Path) -> AcpfsMount:
    """A mount with 4 MiB written, of which nothing drains before the test wants it."""
    mount = make_mount(backing, transport, bandwidth="1")
    (mount.path / "big").write_bytes(os.urandom(4 * MIB))
    return mount


@contextlib.contextmanager
def user_of(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with its working directory in the mount."""
    process = subprocess.Popen(["cat"], cwd=path, stdin=subprocess.PIPE)
    assert process.stdin is not None
    try:
        yield process
    finally:
        process.stdin.close()
        process.wait(60)


def same(a: Path, b: Path) -> bool:
    return a.read_bytes() == b.read_bytes()


@pytest.mark.clause("S216")
@BOTH
def test_mount_write_flush_umount(make_mount: MakeMount, transport: str, tmp_path: Path) -> None:
    backing = tmp_path / "back, ing"
    backing.mkdir()
    mount = make_mount(backing, transport)
    entry = mounted_at(str(mount.path))
    assert entry is not None
    assert (entry.kind, entry.source) == ("fuse.acpfs", str(backing))
    (mount.path / "run").mkdir()
    (mount.path / "run" / "model.pt").write_bytes(os.urandom(MIB))
    mount.flush()
    assert same(mount.path / "run/model.pt", backing / "run/model.pt")
    assert [row["status"] for row in mount.ctl("verify")] == ["ok"]
    mount.run("acpfs-ctl", "wait", str(mount.path / "run/model.pt"), "--verified")
    (row,) = mount.ctl("ls", str(mount.path / "run"))
    assert (row["path"], row["size"], row["state"], len(row["checksum"])) == (
        "run/model.pt",
        MIB,
        "clean",
        32,
    )
    mount.umount()
    assert mount.leaks() == []
    assert list((mount.runtime_dir / "mounts").iterdir()) == []


def test_status_json_keeps_its_contract(slow: AcpfsMount) -> None:
    status = slow.status()
    assert {name: type(status[name]) for name in STATUS_FIELDS} == STATUS_FIELDS
    assert status["ram"].keys() >= RAM_FIELDS
    assert (
        status["ram"]["used_bytes"]
        == status["ram"]["dirty_bytes"] + status["ram"]["clean_bytes"]
        >= 4 * MIB
    )
    assert status["queue"][0].keys() >= QUEUE_FIELDS
    assert (status["queue"][0]["name"], status["queue"][0]["size"]) == ("big", 4 * MIB)
    assert (status["mount"], status["backing"]) == (str(slow.path), str(slow.backing))
    assert is_alive(status["worker"]["pid"])
    slow.ctl("set", "bandwidth=0")


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_the_human_status_says_what_is_not_safe(slow: AcpfsMount) -> None:
    text = slow.run("acpfs-ctl", str(slow.path), "status").stdout
    assert text.startswith("not yet safe: 1 operation, 4.0 MiB")
    slow.ctl("set", "bandwidth=0")
    slow.flush()
    assert slow.run("acpfs-ctl", "status").stdout.startswith("safe: everything that was closed")


def test_a_deadline_names_what_is_left_and_keeps_the_mount(slow: AcpfsMount) -> None:
    for command in (
        ("acpfs-ctl", str(slow.path), "flush", "--timeout", "0.1"),
        ("acpfs", "umount", str(slow.path), "--timeout", "0.1"),
    ):
        done = slow.run(*command, check=False)
        assert done.returncode == ExitCode.TIMEOUT
        assert "big" in done.stderr
        assert "not everything is persisted in time" in done.stderr
    answer = json.loads(
        slow.run(
            "acpfs-ctl", str(slow.path), "flush", "--timeout", "0.1", "--json", check=False
        ).stdout
    )
    assert answer["error"]["exit_code"] == ExitCode.TIMEOUT
    assert answer["error"]["left"][0]["name"] == "big"
    assert is_mounted(slow.path)
    (slow.path / "still").write_text("usable")
    slow.ctl("set", "bandwidth=0")


def test_umount_leave_keeps_the_rest_for_the_next_mount(slow: AcpfsMount) -> None:
    content = (slow.path / "big").read_bytes()
    slow.run("acpfs", "umount", str(slow.path), "--timeout", "0", "--leave")
    assert not is_mounted(slow.path)
    assert not (slow.backing / "big").exists()
    slow.start(bandwidth=0)
    slow.flush()
    assert (slow.backing / "big").read_bytes() == content


def test_a_mount_in_use_is_refused_and_stays(
    make_mount: MakeMount, transport: str, backing: Path
) -> None:
    mount = make_mount(backing, transport)
    with user_of(mount.path), pytest.raises(CommandError, match="is in use") as caught:
        mount.umount()
    assert caught.value.code == ExitCode.REFUSED
    assert mount.status()["mount"] == str(mount.path)


def test_a_mount_that_a_container_has_is_not_waited_for(
    make_mount: MakeMount, transport: str, backing: Path
) -> None:
    """Another mount namespace keeps the kernel's session, for as long as it likes.

    So the mount stays, here too.
    """
    mount = make_mount(backing, transport)
    (mount.path / "f").write_bytes(b"saved")
    supervisor = mount.supervisor
    command = namespace("sh", "-c", "echo; exec sleep 300", kept=mount.path)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as container:
        assert container.stdout is not None
        container.stdout.readline()
        try:
            for _ in range(2):
                refused = mount.run(
                    "acpfs", "umount", str(mount.path), "--timeout", "5", check=False
                )
                assert refused.returncode == ExitCode.REFUSED
                assert (
                    f"process {container.pid} still has it in another mount namespace"
                    in refused.stderr
                )
                assert is_mounted(mount.path), "what is written now would go past it"
                (mount.path / "g").write_bytes(b"through it")
        finally:
            container.kill()
    mount.umount()
    mount.wait_ended(supervisor)
    assert (backing / "f").read_bytes() == b"saved"
    assert (backing / "g").read_bytes() == b"through it"
    assert mount.leaks() == []


@pytest.mark.clause("S21", "S594")
@pytest.mark.transports("native-passthrough", "native-direct", "libfuse")
def test_a_container_that_stays_keeps_the_mount_from_no_end_and_no_new_one(
    make_mount: MakeMount, transport: str, backing: Path
) -> None:
    """It has the mount in a namespace of its own, which nothing here reaches: a worker is replaced
    beside it, SIGTERM ends the mount, and another one comes; it is told that its own is dead.
    """
    mount = make_mount(backing, transport, environment={SESSION_ENDS_VARIABLE: "2"})
    (mount.path / "f").write_bytes(b"saved")
    script = 'while read -r name; do cat "$0/$name" || echo none; echo; done'
    command = namespace("sh", "-c", script, str(mount.path), kept=mount.path)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as container:
        assert container.stdin is not None
        assert container.stdout is not None

        def seen(name: str) -> str:
            print(name, file=container.stdin, flush=True)
            return str(container.stdout.readline()).strip()  # type: ignore[union-attr]

        try:
            assert seen("f") == "saved"
            if transport != "libfuse":  # whose mount ends with its worker
                mount.kill_worker()
                assert seen("f") == "saved"
            (mount.path / "g").write_bytes(b"behind it")
            supervisor = mount.supervisor
            mount.terminate()
            mount.wait_ended(supervisor)
            assert (backing / "g").read_bytes() == b"behind it"
            assert not is_mounted(mount.path)
            assert seen("f") == "none", "that mount is dead, and says so"
            container.stdout.readline()
            mount.start()
            (mount.path / "h").write_bytes(b"anew")
            mount.flush()
            assert (backing / "h").read_bytes() == b"anew"
            assert seen("f") == "none"
            mount.umount()
            assert container.poll() is None
        finally:
            container.kill()
    assert mount.leaks() == []


@pytest.mark.clause("S442")
@pytest.mark.transports("native", "libfuse")
def test_a_mount_that_an_overlay_shows_is_in_use(
    make_mount: MakeMount, transport: str, backing: Path, tmp_path: Path
) -> None:
    """umount(2) knows nothing of it: the mount point would be free, and the session would last as
    long as the overlay.
    """
    mount = make_mount(backing, transport)
    places = [tmp_path / name for name in ("upper", "work", "over")]
    for place in (mount.path / "deeper", mount.path / "deeper/low", *places):
        place.mkdir()
    (mount.path / "deeper/low/f").write_bytes(b"saved")
    mount.flush()
    inside = "deeper/low"
    above = f"{mount.path.name}/deeper/low"
    for base, name, says in (
        ("/", f"{mount.path}/deeper/low", "has a directory of it"),
        (mount.path, inside, f"seems to have a directory of it ({inside})"),
        (mount.path.parent, above, f"seems to have a directory of it ({above})"),
    ):
        options = f"lowerdir={name},upperdir={places[0]},workdir={places[1]}"
        words = ["mount", "-t", "overlay", "overlay", "-o", options, str(places[2])]
        if subprocess.run(words, cwd=base, check=False).returncode:
            pytest.skip("no overlay can lie here")
        try:
            refused = mount.run("acpfs", "umount", str(mount.path), "--timeout", "5", check=False)
            assert refused.returncode == ExitCode.REFUSED
            assert f"the overlay on {places[2]} {says}" in refused.stderr
            assert is_mounted(mount.path)
        finally:
            subprocess.run(["umount", str(places[2])], check=True)
    mount.umount()
    assert (backing / "deeper/low/f").read_bytes() == b"saved"


def test_a_mount_that_is_held_unseen_is_said_to_be_detached(
    make_mount: MakeMount, transport: str, backing: Path
) -> None:
    """A copy of the mount that is attached nowhere, as it stands in no table."""
    mount = make_mount(backing, transport, environment={SESSION_ENDS_VARIABLE: "2"})
    (mount.path / "f").write_bytes(b"saved")
    supervisor = mount.supervisor
    tree = clone(mount.path)
    try:
        refused = mount.run("acpfs", "umount", str(mount.path), "--timeout", "5", check=False)
        assert refused.returncode == ExitCode.REFUSED
        assert "is unmounted here, but something in the kernel still has it" in refused.stderr
        assert any("is unmounted here, but" in text for text in mount.status()["warnings"])
    finally:
        os.close(tree)
    mount.wait_ended(supervisor)
    assert (backing / "f").read_bytes() == b"saved"
    assert mount.leaks() == []


def test_a_mount_that_a_container_has_for_a_moment_is_waited_for(
    make_mount: MakeMount, transport: str, backing: Path
) -> None:
    mount = make_mount(backing, transport)
    command = namespace("sh", "-c", "echo; exec sleep 4", kept=mount.path)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as container:
        assert container.stdout is not None
        container.stdout.readline()
        mount.umount()
    assert mount.leaks() == []


@pytest.mark.clause("S446")
def test_a_mount_of_another_run_directory_is_known_for_one_and_status_names_the_log(
    make_mount: MakeMount, transport: str, backing: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log file"
    mount = make_mount(backing, transport, log_file=log)
    assert mount.status()["worker"]["log_file"] == str(log)
    shown = mount.run("acpfs-ctl", str(mount.path), "status").stdout
    assert f"log      {log}" in shown
    other = AcpfsMount(backing, mount.path, transport, runtime_dir=tmp_path / "other")
    other.runtime_dir.mkdir()
    for path in (mount.path, mount.path / "f"):
        refused = other.run("acpfs-ctl", str(path), "status", check=False)
        assert refused.returncode == ExitCode.NOT_MOUNTED
        assert f"{mount.path} is an acpfs mount, but its run directory is not here" in (
            refused.stderr
        )
        assert "ACPFS_RUNTIME_DIR" in refused.stderr


@pytest.mark.clause("S473")
def test_nothing_is_native_in_a_mount_whose_daemon_cannot_be_asked(
    make_mount: MakeMount,
    transport: str,
    backing: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mount = make_mount(backing, transport)
    (mount.path / "f").write_bytes(b"in RAM")
    (tmp_path / "other").mkdir(mode=0o700)
    monkeypatch.setenv("ACPFS_RUNTIME_DIR", str(tmp_path / "other"))
    with pytest.raises(NotMountedError, match="its run directory is not here"):
        durability(mount.path / "f")
    (tmp_path / "link").symlink_to(mount.path)
    with pytest.raises(NotMountedError):
        durability(tmp_path / "link" / "f")
    (tmp_path / "plain").touch()
    assert durability(tmp_path / "plain") is Durability.NATIVE


@pytest.mark.clause("S443")
def test_what_a_cleaner_has_removed_of_the_run_directory_is_made_anew(
    make_mount: MakeMount, transport: str, backing: Path
) -> None:
    """Record and sockets, as a cleaner of /tmp does after some days: the mount could not be asked,
    nor unmounted in order.
    """
    mount = make_mount(backing, transport)
    (mount.path / "f").write_bytes(b"saved")
    removed = [
        file for name in ("mounts", "sockets") for file in (mount.runtime_dir / name).iterdir()
    ]
    assert len(removed) >= 2
    for file in removed:
        file.unlink()
    while not all(file.exists() for file in removed):
        threading.Event().wait(0.05)
    assert mount.status()["state"] == "serving"
    mount.umount()
    assert (backing / "f").read_bytes() == b"saved"
    assert mount.leaks() == []


@pytest.mark.clause("S418", "S81")
def test_a_run_directory_that_is_moved_ends_no_mount(
    make_mount: MakeMount, transport: str, backing: Path
) -> None:
    """Eight workers in a row did not find the RAM tier, and the mount ended with what it held."""
    mount = make_mount(backing, transport)
    (mount.path / "f").write_bytes(b"saved")
    places = [
        file for name in ("mounts", "sockets") for file in (mount.runtime_dir / name).iterdir()
    ]
    mount.runtime_dir.rename(mount.runtime_dir.with_name("moved"))
    (mount.path / "g").write_bytes(b"at once")
    while not all(file.exists() for file in places):
        threading.Event().wait(0.05)
    assert mount.status()["worker"]["number"] == 1
    wait_gone(mount.kill_worker())
    (mount.path / "h").write_bytes(b"by the next")
    assert (mount.path / "g").read_bytes() == b"at once"
    mount.umount()
    assert {path.name: path.read_bytes() for path in backing.iterdir() if path.is_file()} == {
        "f": b"saved",
        "g": b"at once",
        "h": b"by the next",
    }
    assert mount.leaks() == []


@pytest.mark.clause("S418", "S81")
@pytest.mark.transports("native")
def test_nor_does_one_that_is_moved_while_no_worker_lives(
    make_mount: MakeMount, transport: str, backing: Path
) -> None:
    mount = make_mount(backing, transport)
    (mount.path / "f").write_bytes(b"saved")
    stopped = mount.pid
    stop_processes([stopped])
    mount.runtime_dir.rename(mount.runtime_dir.with_name("moved"))
    os.kill(stopped, signal.SIGKILL)
    with open(mount.path / "g", "wb") as file:
        file.write(b"by the next")
    while not mount.runtime_dir.exists() or not list(mount.runtime_dir.glob("sockets/*.sock")):
        threading.Event().wait(0.05)
    mount.umount()
    assert {(backing / name).read_bytes() for name in "fg"} == {b"saved", b"by the next"}
    assert mount.leaks() == []


@pytest.mark.clause("S196")
def test_second_mounts_are_refused(
    make_mount: MakeMount, transport: str, backing: Path, tmp_path: Path
) -> None:
    first = make_mount(backing, transport, node_id="n1")
    (tmp_path / "other").mkdir()
    (tmp_path / "m2").mkdir()
    same_place = first.run("acpfs", "mount", str(tmp_path / "other"), str(first.path), check=False)
    assert same_place.returncode == ExitCode.REFUSED
    assert "is in use by another acpfs" in same_place.stderr
    same_identity = first.run(
        "acpfs", "mount", str(backing), str(tmp_path / "m2"), "--node-id", "n1", check=False
    )
    assert same_identity.returncode == ExitCode.REFUSED
    assert "already mounted under node id n1" in same_identity.stderr
    elsewhere = ["--node-id", "n1", "--runtime-dir", str(tmp_path / "as-on-another-machine")]
    same_record = first.run(
        "acpfs", "mount", str(backing), str(tmp_path / "m2"), *elsewhere, check=False
    )
    assert same_record.returncode == ExitCode.REFUSED
    assert "node id n1 is in use: " in same_record.stderr
    assert not is_mounted(tmp_path / "m2")


def test_what_a_killed_daemon_left_is_found_and_drained(slow: AcpfsMount) -> None:
    content = (slow.path / "big").read_bytes()
    slow.kill()
    gone = slow.run("acpfs-ctl", str(slow.path), "status", check=False)
    assert gone.returncode == ExitCode.NOT_MOUNTED
    assert "kept in the RAM tier" in gone.stderr
    assert not (slow.backing / "big").exists()
    slow.start(bandwidth=0)
    slow.flush()
    assert (slow.backing / "big").read_bytes() == content
    slow.umount()
    assert slow.leaks() == []


@BOTH
def test_a_dead_mount_is_cleared_by_umount_and_by_the_next_mount(slow: AcpfsMount) -> None:
    for clear in (lambda: slow.run("acpfs", "umount", str(slow.path)), lambda: None):
        slow.kill_processes()
        assert is_mounted(slow.path)
        clear()
        slow.run("acpfs", "mount", str(slow.backing), str(slow.path), "--ram", "512M")
        slow.flush()


@BOTH
def test_sigterm_drains_and_ends(slow: AcpfsMount) -> None:
    slow.ctl("set", "bandwidth=8M")
    content = (slow.path / "big").read_bytes()
    slow.terminate()
    assert (slow.backing / "big").read_bytes() == content
    assert slow.leaks() == []


def test_sigterm_keeps_what_its_deadline_leaves(
    make_mount: MakeMount, transport: str, backing: Path
) -> None:
    mount = make_mount(backing, transport, bandwidth="1", drain_timeout="0.2")
    content = os.urandom(MIB)
    (mount.path / "big").write_bytes(content)
    mount.terminate()
    assert not is_mounted(mount.path)
    assert not (backing / "big").exists()
    mount.start(bandwidth=0)
    mount.flush()
    assert (backing / "big").read_bytes() == content


def test_a_second_sigterm_is_in_a_hurry(slow: AcpfsMount) -> None:
    pid = slow.supervisor
    os.kill(pid, signal.SIGTERM)
    slow.wait_status(lambda status: status["state"] == "draining")
    tell_again(pid)
    slow.wait_ended(pid)
    assert not (slow.backing / "big").exists()
    assert mounts_below(slow.runtime_dir)  # the RAM tier
    slow.start(bandwidth=0)
    slow.flush()


def test_sigterm_takes_the_mount_from_its_users(
    make_mount: MakeMount, transport: str, backing: Path
) -> None:
    mount = make_mount(backing, transport)
    (mount.path / "done").write_text("x")
    with user_of(mount.path):
        mount.terminate()
    assert not is_mounted(mount.path)
    assert (backing / "done").read_text() == "x"


@BOTH
def test_umount_by_others_drains_afterwards(slow: AcpfsMount) -> None:
    slow.ctl("set", "bandwidth=8M")
    content = (slow.path / "big").read_bytes()
    pid = slow.pid
    subprocess.run(["umount", str(slow.path)], check=True, timeout=60)
    slow.wait_ended(pid)
    assert (slow.backing / "big").read_bytes() == content
    assert slow.leaks() == []


@BOTH
def test_control_answers_while_the_backing_directory_hangs(
    fault_fs: FaultFs, make_mount: MakeMount, transport: str
) -> None:
    (fault_fs.source / "unread").write_text("y")
    mount = make_mount(fault_fs.path, transport)
    (mount.path / "known").write_text("x")
    mount.flush()
    assert sorted(os.listdir(mount.path)) == ["known", "unread"]
    assert (mount.path / "unread").stat().st_size == 1
    fault_fs.freeze()
    (mount.path / "stuck").write_bytes(bytes(MIB))
    fault_fs.wait_frozen()
    status = mount.status()
    assert (status["queue_length"], status["queue"][0]["name"]) == (1, "stuck")
    assert mount.ctl("ls", str(mount.path / "stuck"))[0]["state"] in ("complete", "streaming")
    assert "acpfs_queue_operations" in mount.run("acpfs-ctl", "metrics").stdout
    late = mount.run("acpfs-ctl", "flush", "--timeout", "0.2", check=False)
    assert late.returncode == ExitCode.TIMEOUT
    if transport == "native":
        reader = subprocess.Popen(["cat", mount.path / "unread"], stderr=subprocess.DEVNULL)
        called = mount.wait_status(lambda status: status["waiting_calls"])["waiting_calls"][0]
        assert (called["path"], called["pid"], called["command"]) == ("unread", reader.pid, "cat")
        assert (
            f"(process {reader.pid}, cat) waits in {called['call']}"
            in mount.run("acpfs-ctl", "status").stdout
        )
        fault_fs.thaw()
        assert reader.wait(60) == 0
    fault_fs.thaw()
    mount.flush()


def test_what_is_refused_for_good_is_shown_retried_and_discarded(
    fault_fs: FaultFs, make_mount: MakeMount, transport: str
) -> None:
    mount = make_mount(fault_fs.path, transport)
    rule = fault_fs.fail("EACCES", ["rename"], glob="*refused*")
    (mount.path / "refused1").write_text("one")
    (mount.path / "refused2").write_text("two")
    mount.wait_status(lambda status: status["parked"] == 2)
    done = mount.run("acpfs-ctl", "flush", check=False)
    assert done.returncode == ExitCode.FAILED
    assert "refused1" in done.stderr
    assert "EACCES: Permission denied" in done.stderr
    health = mount.status()["backing_health"]
    assert (health["state"], "Permission denied" in health["last_error"]) == ("refusing", True)
    assert "REFUSED" in mount.run("acpfs-ctl", "status").stdout
    assert mount.run("acpfs", "umount", str(mount.path), check=False).returncode == ExitCode.FAILED
    assert mount.ctl("discard", str(mount.path / "refused2"))["operations"] == 1
    fault_fs.clear(rule)
    assert mount.ctl("retry", str(mount.path / "refused1"))["operations"] == 1
    mount.flush()
    assert (fault_fs.source / "refused1").read_text() == "one"
    assert not (fault_fs.source / "refused2").exists()


def test_settings_change_in_use(make_mount: MakeMount, transport: str, backing: Path) -> None:
    mount = make_mount(backing, transport, ram="64M")
    assert mount.ctl("set", "bandwidth=5M", "streams=3", "log_level=debug", "ram=96M") == {
        "bandwidth": 5 * MIB,
        "streams": 3,
        "log_level": "debug",
        "ram": 96 * MIB,
    }
    assert mount.status()["ram"]["budget_bytes"] == 96 * MIB
    assert mount.ctl("config")["streams"] == 3
    for bad in (
        "streams=0",
        "fsync=durable",
        "ram=900T",
        "ram=nonsense",
        "spill_budget=1G",
        "what",
    ):
        assert mount.run("acpfs-ctl", "set", bad, check=False).returncode in (
            ExitCode.USAGE,
            ExitCode.ENVIRONMENT,
        )
    assert mount.ctl("config")["streams"] == 3


def test_sighup_opens_the_log_again(
    make_mount: MakeMount, transport: str, backing: Path, tmp_path: Path
) -> None:
    log = tmp_path / "acpfs.log"
    mount = make_mount(backing, transport, log_file=str(log))
    log.rename(tmp_path / "moved")
    os.kill(mount.pid, signal.SIGHUP)
    mount.terminate()
    assert '"unmounted"' in log.read_text()
    assert '"mounted"' in (tmp_path / "moved").read_text()


IMPATIENT_MOUNT = """
import sys
from acpfs.cli.main import main
from acpfs.mounting import checks
checks.BACKING_WAIT_S = 0.3
sys.argv[1:1] = ["mount"]
main()
"""


@pytest.mark.clause("S89")
def test_a_hanging_backing_directory_is_one_line(fault_fs: FaultFs, tmp_path: Path) -> None:
    """And the command ends, while its look at the directory does not."""
    (tmp_path / "mnt").mkdir()
    fault_fs.freeze()
    command = [
        sys.executable,
        "-c",
        IMPATIENT_MOUNT,
        str(fault_fs.path),
        str(tmp_path / "mnt"),
        "--runtime-dir",
        str(tmp_path / "run"),
    ]
    mounting = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    try:
        _out, said = mounting.communicate(timeout=60)
    finally:
        fault_fs.thaw()
        mounting.kill()
        mounting.wait()
    assert (mounting.returncode, said.count("\n")) == (ExitCode.ENVIRONMENT, 1)
    assert "does not answer" in said


def wait_until_said(manager: socket.socket, word: str) -> None:
    """Other words may come before: the watchdog is fed from the start, also while the mount is
    being made.
    """
    while word not in manager.recv(4096).decode().splitlines():
        pass


def test_foreground_tells_the_service_manager(backing: Path, tmp_path: Path) -> None:
    mount = AcpfsMount(backing, tmp_path / "mnt")
    mount.path.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(120)
        env = {
            **os.environ,
            "NOTIFY_SOCKET": str(tmp_path / "notify"),
            "ACPFS_RUNTIME_DIR": str(mount.runtime_dir),
            "WATCHDOG_USEC": "200000",
        }
        words = ["mount", str(backing), str(mount.path), "--foreground", "--ram", "64M"]
        with open(tmp_path / "log", "wb") as log:
            daemon = subprocess.Popen(
                [sys.executable, "-m", "acpfs.cli.main", *words], env=env, stderr=log
            )
        try:
            wait_until_said(manager, "READY=1")
            assert is_mounted(mount.path)
            wait_until_said(manager, "WATCHDOG=1")
            daemon.terminate()
            wait_until_said(manager, "STOPPING=1")
            assert daemon.wait(240) == 0
        finally:
            daemon.kill()
            daemon.wait()
            mount.abort()
    assert "event=mounted" in (tmp_path / "log").read_text()


def test_mount_8_finds_its_way_in(backing: Path, tmp_path: Path) -> None:
    helper = Path("/sbin/mount.acpfs")
    if helper.exists():
        pytest.skip("an installed helper is in the way")
    mount = AcpfsMount(backing, tmp_path / "mnt")
    mount.path.mkdir()
    mount.runtime_dir.mkdir()
    code = "from acpfs.cli.system_mount import main; main()"
    helper.write_text(
        f"#!/bin/sh\nPYTHONPATH={os.getcwd()} exec {sys.executable} -c '{code}' \"$@\"\n"
    )
    helper.chmod(0o755)
    try:
        options = f"ram=64M,fsync=durable,_netdev,x-test,runtime_dir={mount.runtime_dir}"
        subprocess.run(
            ["mount", "-t", "acpfs", str(backing), str(mount.path), "-o", options],
            check=True,
            timeout=60,
            cwd="/",
        )
        config = mount.ctl("config")
        assert (config["ram"], config["fsync"]) == (64 * MIB, "durable")
        refused = subprocess.run(
            ["mount", "-t", "acpfs", str(backing), "/mnt", "-o", "rom=1"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert refused.returncode == 1
        assert "unknown mount option 'rom'" in refused.stderr
        mount.umount()
    finally:
        helper.unlink()
        mount.abort()
