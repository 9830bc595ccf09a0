"""The native transport on real mounts: sessions, features, interrupts, takeover."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from acpfs.errors import MachineError
from acpfs.transport.native.mount import MountOptions, mount, mount_with_helper
from acpfs.transport.native.negotiate import ALL_FEATURES, Negotiated
from acpfs.transport.native.protocol import InitFlag
from tests.transport.doubles import HANGS_SUFFIX
from tests.transport.mounted import NativeMount

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(
        os.geteuid() != 0 or not os.access("/dev/fuse", os.W_OK), reason="needs root and /dev/fuse"
    ),
]


LOOK_AGAIN_S = 0.01


def program(text: str, *arguments: object) -> subprocess.Popen[str]:
    """A Python program that runs beside the test; its output is a pipe."""
    return subprocess.Popen(
        [sys.executable, "-c", text, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )


def finished(process: subprocess.Popen[str], timeout_s: float = 240) -> tuple[int, str]:
    output, _ = process.communicate(timeout=timeout_s)
    return process.returncode, output


def wait_for_request(mounted: NativeMount) -> None:
    """Until the server has read the request that hangs.

    One that is still queued would be there for the next server, and not fail.
    """
    deadline = time.monotonic() + 60
    while not Path(f"{mounted.backing}{HANGS_SUFFIX}").exists():
        assert time.monotonic() < deadline
        threading.Event().wait(LOOK_AGAIN_S)  # nobody announces it


def mount_lines() -> list[str]:
    return Path("/proc/self/mountinfo").read_text().splitlines()


# -- sessions


def test_a_file_goes_around(tmp_path: Path) -> None:
    with NativeMount(tmp_path) as mounted:
        data = os.urandom(3 << 20)
        (mounted.path / "d").mkdir()
        (mounted.path / "d/f").write_bytes(data)
        assert (mounted.path / "d/f").read_bytes() == data
        assert mounted.unmount() == 0
        assert mounted.wait_for_server() == 0
    assert "Traceback" not in mounted.log()


@pytest.mark.parametrize(
    "lacking",
    [
        InitFlag.PASSTHROUGH,
        InitFlag.DIRECT_IO_ALLOW_MMAP,
        InitFlag.MAX_PAGES,
        InitFlag.HANDLE_KILLPRIV_V2,
        InitFlag.ATOMIC_O_TRUNC,
        InitFlag.DO_READDIRPLUS,
        InitFlag.SETXATTR_EXT,
        InitFlag.INIT_EXT,
        InitFlag((1 << 43) - 1),
    ],
    ids=lambda flag: flag.name or "all",
)
def test_a_kernel_that_lacks_features(tmp_path: Path, lacking: InitFlag) -> None:
    with NativeMount(tmp_path, "--mask", str(((1 << 64) - 1) & ~int(lacking))) as mounted:
        assert not Negotiated.from_record(mounted.negotiated).has(lacking)
        f = mounted.path / "f"
        data = os.urandom((2 << 20) + 5)
        f.write_bytes(data)
        f.write_bytes(data[1:])
        assert f.read_bytes() == data[1:]
        assert shared_map(f)[:4096] == data[1:4097]
        os.setxattr(f, "user.a", b"value")
        assert os.getxattr(f, "user.a") == b"value"
        os.truncate(f, 3)
        assert f.stat().st_size == 3
        assert [e.name for e in os.scandir(mounted.path)] == ["f"]


def shared_map(path: Path) -> bytes:
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapped,
    ):
        return mapped[:]


def test_unmount_is_refused_while_a_file_is_open(tmp_path: Path) -> None:
    with NativeMount(tmp_path) as mounted:
        with (mounted.path / "f").open("wb") as file:
            assert mounted.unmount() != 0
            assert mounted.unmount("-l") == 0
            file.write(b"still served")
            file.flush()
            assert os.fstat(file.fileno()).st_size == 12
        assert mounted.wait_for_server() == 0


def test_many_threads_at_once(tmp_path: Path) -> None:
    text = """
import os, sys, threading
def work(n):
    for i in range(40):
        path = f"{sys.argv[1]}/{n}-{i}"
        with open(path, "wb") as f: f.write(bytes([n]) * 300_000)
        with open(path, "rb") as f: assert f.read() == bytes([n]) * 300_000
        os.unlink(path)
threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
print(os.listdir(sys.argv[1]))
"""
    with NativeMount(tmp_path, "--readers", "4") as mounted:
        assert finished(program(text, mounted.path)) == (0, "[]\n")
    assert "Traceback" not in mounted.log()


def test_seek_tmpfile_and_fallocate(tmp_path: Path) -> None:
    with NativeMount(tmp_path) as mounted:
        fd = os.open(mounted.path, os.O_TMPFILE | os.O_RDWR, 0o640)
        os.pwrite(fd, b"end", 1 << 20)
        assert os.lseek(fd, 0, os.SEEK_DATA) == 1 << 20
        os.posix_fallocate(fd, 0, 2 << 20)
        assert os.fstat(fd).st_size == 2 << 20
        os.link(f"/proc/self/fd/{fd}", mounted.path / "named", src_dir_fd=fd, follow_symlinks=True)
        os.close(fd)
        assert (mounted.path / "named").stat().st_mode == 0o100640


def test_writing_and_giving_away_take_set_uid_away(tmp_path: Path) -> None:
    text = "import os, sys; os.setgid(1000); os.setuid(1000); open(sys.argv[1], 'r+b').write(b'x')"
    os.chmod(tmp_path, 0o755)
    for parent in tmp_path.parents[:2]:
        os.chmod(parent, 0o755)
    with NativeMount(tmp_path) as mounted:
        os.chmod(mounted.path, 0o777)
        for name in ("written", "given"):
            (mounted.path / name).touch()
            os.chmod(mounted.path / name, 0o6777)
        assert finished(program(text, mounted.path / "written"))[0] == 0
        os.chown(mounted.path / "given", 1000, 1000)
        assert [os.stat(mounted.path / n).st_mode & 0o7777 for n in ("written", "given")] == [
            0o777,
            0o777,
        ]


def test_birth_time_is_not_invented(tmp_path: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with NativeMount(tmp_path) as mounted:
        (mounted.path / "f").write_bytes(b"12345")
        buffer = ctypes.create_string_buffer(256)
        assert libc.statx(-100, os.fsencode(mounted.path / "f"), 0, 0xFFF, buffer) == 0
        mask = int.from_bytes(buffer.raw[0:4], "little")
        size = int.from_bytes(buffer.raw[40:48], "little")
        assert (mask & 0x800, size) == (0, 5)


# -- interrupts


def test_a_dying_caller_gets_out_of_a_hanging_call(tmp_path: Path) -> None:
    with NativeMount(tmp_path, "--hang", "hangs") as mounted:
        stuck = program("import os, sys; os.stat(sys.argv[1])", mounted.path / "hangs")
        wait_for_request(mounted)
        stuck.terminate()
        assert finished(stuck)[0] == -signal.SIGTERM
        assert os.listdir(mounted.path) == []


STAT_WITH_A_TIMER = """
import os, signal, sys
signal.signal(signal.SIGALRM, lambda *_: None); signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
os.stat(sys.argv[1])
"""


def lies_below(base: Path, name: str) -> None:
    """Before the mount: a name that the first listing has is waited for, one that it has not is
    soon not there (S206).
    """
    (base / "backing").mkdir()
    (base / "backing" / name).write_text("content")


def test_a_caller_that_only_gets_a_signal_goes_on_waiting(tmp_path: Path) -> None:
    lies_below(tmp_path, "hangs")
    with NativeMount(tmp_path, "--hang", "hangs") as mounted:
        stuck = program(STAT_WITH_A_TIMER, mounted.path / "hangs")
        wait_for_request(mounted)
        with pytest.raises(subprocess.TimeoutExpired):
            stuck.wait(timeout=1.5)
        stuck.kill()
        assert finished(stuck)[0] == -signal.SIGKILL


@pytest.mark.clause("S132")
def test_a_caller_with_a_signal_that_it_catches_can_be_ended_by_another(tmp_path: Path) -> None:
    """Timers are such signals.

    The kernel keeps the second one beside the first, and calls it deadly when the program runs
    again.
    """
    lies_below(tmp_path, "hangs")
    with NativeMount(tmp_path, "--hang", "hangs") as mounted:
        stuck = program(STAT_WITH_A_TIMER, mounted.path / "hangs")
        wait_for_request(mounted)
        status = Path(f"/proc/{stuck.pid}/status")
        deadline = time.monotonic() + 60
        while f"ShdPnd:\t{1 << (signal.SIGALRM - 1):016x}" not in status.read_text():
            assert time.monotonic() < deadline
            threading.Event().wait(LOOK_AGAIN_S)
        stuck.terminate()
        assert finished(stuck)[0] == -signal.SIGTERM


# -- takeover


def test_a_new_server_takes_over_and_answers_what_the_old_one_had_read(tmp_path: Path) -> None:
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    fd = mount(mountpoint, MountOptions("kept"))
    lies_below(tmp_path, "asked")
    with NativeMount(tmp_path, "--hang", "asked", fd=fd) as mounted:
        text = "import sys; print(open(sys.argv[1]).read(), end='')"
        asking = program(text, mounted.path / "asked")
        wait_for_request(mounted)
        mounted.kill_server()
        mounted.start_server("--negotiated", json.dumps(mounted.negotiated))
        assert finished(asking) == (0, "content")
        (mounted.path / "new").write_bytes(b"by the new one")
        assert (mounted.path / "new").read_bytes() == b"by the new one"


@pytest.mark.clause("S211")
def test_without_resending_what_the_old_server_had_read_ends_with_its_end(tmp_path: Path) -> None:
    """Linux before 6.9. The descriptors that outlive the server must not keep its calls."""
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    fd = mount(mountpoint, MountOptions("kept"))
    mask = ALL_FEATURES & ~int(InitFlag.HAS_RESEND)
    lies_below(tmp_path, "asked")
    with NativeMount(tmp_path, "--hang", "asked", "--mask", hex(mask), fd=fd) as mounted:
        text = (
            "import sys\ntry: open(sys.argv[1])\nexcept OSError as error: print(error.errno, "
            "end='')"
        )
        asking = program(text, mounted.path / "asked")
        wait_for_request(mounted)
        mounted.kill_server()
        assert finished(asking) == (0, str(errno.ECONNABORTED))
        mounted.start_server("--negotiated", json.dumps(mounted.negotiated))
        assert (mounted.path / "asked").read_text() == "content"


def test_names_written_before_the_takeover_are_there_after_it(tmp_path: Path) -> None:
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    fd = mount(mountpoint, MountOptions("kept"))
    with NativeMount(tmp_path, fd=fd) as mounted:
        (mounted.path / "d").mkdir()
        (mounted.path / "d/f").write_bytes(b"before")
        mounted.kill_server()
        mounted.start_server("--negotiated", json.dumps(mounted.negotiated))
        assert (mounted.path / "d/f").read_bytes() == b"before"


# -- mounting


def test_mounting_where_nothing_can_be_mounted(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="No such file"):
        mount(tmp_path / "missing", MountOptions("x"))


def test_mounting_through_fusermount(tmp_path: Path) -> None:
    """The way of those who may not mount themselves: the descriptor comes over a socket."""
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    fd = mount_with_helper(mountpoint, MountOptions("a, b", allow_other=False))
    with NativeMount(tmp_path, fd=fd) as mounted:
        (mounted.path / "f").write_bytes(b"x")
        line = next(line for line in mount_lines() if line.split()[4] == str(mountpoint))
        assert line.split(" - ")[1].startswith("fuse.acpfs a,\\040b ")


# -- lanes


def lanes_program(mounted: NativeMount, text: str) -> str:
    """Run statements over a file `p` of 8 KiB of `a`; returns what they print."""
    prelude = "import mmap, os, sys\np = sys.argv[1]\nopen(p, 'wb').write(b'a' * 8192)\n"
    code, output = finished(program(prelude + text, mounted.path / "f"))
    assert code == 0, mounted.log()
    return output


@pytest.mark.parametrize(
    "mask",
    [(1 << 64) - 1, ((1 << 64) - 1) & ~int(InitFlag.PASSTHROUGH)],
    ids=["passthrough", "direct"],
)
@pytest.mark.parametrize(
    "text",
    [
        (
            "r = os.open(p, os.O_RDONLY); w = os.open(p, os.O_RDWR); os.pwrite(w, b'xyz', 0); "
            "print(os.pread(r, 3, 0))"
        ),
        (
            "r = os.open(p, os.O_RDONLY); w = os.open(p, os.O_WRONLY); os.pwrite(w, b'xyz', 0); "
            "print(os.pread(r, 3, 0))"
        ),
        (
            "w = os.open(p, os.O_WRONLY); r = os.open(p, os.O_RDWR); os.pwrite(w, b'xyz', 0); "
            "print(os.pread(r, 3, 0))"
        ),
        (
            "w = os.open(p, os.O_RDWR); r = os.open(p, os.O_RDONLY); os.pwrite(w, b'xyz', 0); "
            "print(os.pread(r, 3, 0))"
        ),
        (
            "r = os.open(p, os.O_RDONLY); w = os.open(p, os.O_RDWR); m = mmap.mmap(w, 0); m[0:3] = "
            "b'xyz'; print(os.pread(r, 3, 0))"
        ),
        (
            "w = os.open(p, os.O_RDWR); m = mmap.mmap(w, 0); m[0:3] = b'xyz'; r = os.open(p, "
            "os.O_RDONLY); print(os.pread(r, 3, 0))"
        ),
        (
            "r = os.open(p, os.O_RDONLY); m = mmap.mmap(r, 0, prot=1); "
            "w = os.open(p, os.O_WRONLY); "
            "os.pwrite(w, b'xyz', 0); print(m[:3])"
        ),
        "r = os.open(p, os.O_RDONLY); open(p, 'wb').write(b'xyz'); print(os.pread(r, 9, 0))",
        (
            "w = os.open(p, os.O_RDWR | os.O_DIRECT); r = os.open(p, os.O_RDONLY); os.pwrite(w, "
            "b'xyz', 0); print(os.pread(r, 3, 0))"
        ),
        (
            "w = os.open(p, os.O_WRONLY | os.O_APPEND); r = os.open(p, os.O_RDONLY); os.write(w, "
            "b'xyz'); print(os.pread(r, 9, 8192))"
        ),
        (
            "w = os.open(p, os.O_WRONLY); os.pwrite(w, b'xyz', 0); os.ftruncate(w, 3); "
            "print(open(p, "
            "'rb').read())"
        ),
        # a reader that began in the daemon's lane, and later opens that could have passthrough but
        # for it
        (
            "w = os.open(p, os.O_RDWR); r = os.open(p, 0); os.close(w); w = os.open(p, 1); "
            "os.pwrite(w, b'xyz', 0); print(os.pread(r, 3, 0))"
        ),
        (
            "w = os.open(p, os.O_RDWR); r = os.open(p, 0); m = mmap.mmap(r, 0, prot=1); "
            "os.pwrite(w, b'xyz', 0); os.close(w); os.close(r); "
            "r = os.open(p, 0); assert os.pread(r, 3, 0) == b'xyz'; print(m[:3])"
        ),
        (
            "r = os.open(p, 0); w = os.open(p, os.O_RDWR); m = mmap.mmap(w, 0); os.close(r); "
            "os.close(w); m[:3] = b'xyz'; m.close(); "
            "print(open(p, 'rb').read(3))"
        ),
    ],
)
def test_one_file_opened_in_several_ways(tmp_path: Path, text: str, mask: int) -> None:
    with NativeMount(tmp_path, "--mask", str(mask)) as mounted:
        assert lanes_program(mounted, text) == "b'xyz'\n"


def test_size_is_exact_after_passthrough_writes(tmp_path: Path) -> None:
    text = (
        "w = os.open(p, os.O_WRONLY); [os.write(w, b'x' * 5000) for _ in range(9)]; "
        "print(os.fstat(w).st_size, os.stat(p).st_size)"
    )
    with NativeMount(tmp_path) as mounted:
        assert lanes_program(mounted, text) == "45000 45000\n"


RACE = """
import multiprocessing, os, sys
path, rounds = sys.argv[1], int(sys.argv[2])
cpus = sorted(os.sched_getaffinity(0))

def busy():
    os.sched_setaffinity(0, cpus[:1])
    while True:
        pass

def reader(stop):
    os.sched_setaffinity(0, cpus[-1:])
    while not stop.is_set():
        os.close(os.open(path, os.O_RDONLY))

open(path, "wb").write(b"x" * 1000)
stop = multiprocessing.Event()
others = [multiprocessing.Process(target=busy)]
others += [multiprocessing.Process(target=reader, args=(stop,))]
[one.start() for one in others]
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
os.nice(19)
os.sched_setaffinity(0, cpus[:1])
failed = 0
for _ in range(rounds):
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_SYNC))
    except OSError as error:
        assert error.errno == 5, error
        failed += 1
others[0].kill()
stop.set()
[one.join() for one in others]
print(failed)
"""


@pytest.mark.long
@pytest.mark.clause("S335")
def test_who_opens_a_file_at_the_same_moment_makes_no_open_fail(tmp_path: Path) -> None:
    """The one that has its answer first gets no processor, and comes to its end in the kernel after
    the other one.
    """
    with NativeMount(tmp_path) as mounted:
        code, output = finished(program(RACE, mounted.path / "f", 300), timeout_s=600)
        assert (code, output) == (0, "0\n"), mounted.log()
