"""A worker dies by kill -9, the next one takes its session over: what programs have open goes on,
on either lane.

Without supervisor and engine: the session's descriptor is kept by the test. Each program says when
it is half-way, and goes on when told.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from acpfs.transport.native.mount import MountOptions, mount
from acpfs.transport.native.protocol import InitFlag
from tests.transport.mounted import NativeMount

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(
        os.geteuid() != 0 or not os.access("/dev/fuse", os.W_OK), reason="needs root and /dev/fuse"
    ),
]
MASKS = {"passthrough": (1 << 64) - 1, "direct": ((1 << 64) - 1) & ~int(InitFlag.PASSTHROUGH)}
PRELUDE = """
import errno, fcntl, mmap, os, sys
top = sys.argv[1]; os.chdir(top)
def killed():
    print('half-way', flush=True); sys.stdin.readline()
def content(path):
    with open(path, 'rb') as file: return file.read()
"""


class Kept:
    """A mount whose session outlives its servers."""

    def __init__(self, base: Path, mask: int) -> None:
        mountpoint = base / "mnt"
        mountpoint.mkdir()
        self.mount = NativeMount(
            base, "--mask", str(mask), fd=mount(mountpoint, MountOptions("kept"))
        )

    def kill(self) -> None:
        """kill -9, and the next server."""
        self.mount.kill_server()
        self.mount.start_server("--negotiated", json.dumps(self.mount.negotiated))

    def run(self, text: str, *, kills: int = 1) -> None:
        """A program, with so many kills on its way."""
        command = [sys.executable, "-c", PRELUDE + text, str(self.mount.path)]
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            for _ in range(kills):
                line = process.stdout.readline()
                if line != "half-way\n":
                    break
                self.kill()
                process.stdin.write("\n")
                process.stdin.flush()
            _output, complaint = process.communicate(timeout=60)
            assert process.returncode == 0, complaint + self.mount.log()


@pytest.fixture(params=list(MASKS))
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kept]:
    session = Kept(tmp_path, MASKS[request.param])
    with session.mount:
        yield session


PROGRAMS = {
    "a half-written file": "f = open('f', 'wb', 0); f.write(b'a' * 70000); killed(); "
    "f.write(b'b' * 70000); f.close();"
    "assert content('f') == b'a' * 70000 + b'b' * 70000",
    "a file that is read": "open('f', 'wb').write(b'abc' * 9000); f = open('f', 'rb', 0); "
    "f.read(9000); killed();"
    "assert f.read() == b'abc' * 6000; f.close()",
    "read and write": "f = os.open('f', os.O_RDWR | os.O_CREAT); os.write(f, b'abc'); killed(); "
    "os.pwrite(f, b'X', 1);"
    "assert os.pread(f, 9, 0) == b'aXc'; assert os.fstat(f).st_size == 3",
    "an append log": "f = os.open('f', os.O_WRONLY | os.O_CREAT | os.O_APPEND)\n"
    "for n in range(6):\n    os.write(f, b'line %d\\n' % n); killed()\n"
    "assert content('f') == b''.join(b'line %d\\n' % n for n in range(6))",
    "deleted but open": "f = os.open('f', os.O_RDWR | os.O_CREAT); os.write(f, b'abc'); "
    "os.unlink('f'); killed();"
    "assert os.pread(f, 9, 0) == b'abc'; os.write(f, b'def'); killed(); assert os.pread(f, 9, 0) "
    "== b'abcdef'; os.close(f);"
    "assert os.listdir() == []",
    "deleted while open for reading": "open('f', 'wb').write(b'abc'); f = os.open('f', "
    "os.O_RDONLY); os.unlink('f'); killed();"
    "assert os.pread(f, 9, 0) == b'abc'",
    "a mapping": "f = os.open('f', os.O_RDWR | os.O_CREAT); os.ftruncate(f, 8192); m = "
    "mmap.mmap(f, 8192); m[0:3] = b'abc'; killed();"
    "m[5000:5003] = b'def'; m.flush(); assert os.pread(f, 3, 0) + os.pread(f, 3, 5000) == "
    "b'abcdef'; m.close(); os.close(f);"
    "assert content('f')[5000:5003] == b'def'",
    "a read-only mapping": "open('f', 'wb').write(b'x' * 8192); f = os.open('f', os.O_RDONLY); m "
    "= mmap.mmap(f, 0, prot=1); os.close(f);"
    "killed(); assert m[:] == b'x' * 8192",
    "a file without a name": "f = os.open('.', os.O_TMPFILE | os.O_RDWR); os.write(f, b'abc'); "
    "killed();"
    "os.link(f'/proc/self/fd/{f}', 'named', src_dir_fd=0); assert content('named') == b'abc'",
    "a lock": "f = os.open('f', os.O_RDWR | os.O_CREAT); fcntl.flock(f, fcntl.LOCK_EX); "
    "fcntl.lockf(f, fcntl.LOCK_EX); killed()\n"
    "if os.fork() == 0:\n    g = os.open('f', os.O_RDWR)\n    try: fcntl.flock(g, fcntl.LOCK_EX "
    "| fcntl.LOCK_NB)\n"
    "    except BlockingIOError: os._exit(7)\n    os._exit(0)\nassert "
    "os.waitstatus_to_exitcode(os.wait()[1]) == 7",
    "a directory half read": "[open(f'{n:05}', 'w').close() for n in range(2000)]\n"
    "with os.scandir() as entries:\n    names = [next(entries).name for _ in range(300)]; "
    "killed()\n"
    "    for n in range(0, 2000, 7): os.unlink(f'{n:05}')\n    open('new', 'w').close(); names "
    "+= [e.name for e in entries]\n"
    "assert len(names) == len(set(names)); assert {f'{n:05}' for n in range(2000) if n % 7} <= "
    "set(names)",
    "times that were set": "f = os.open('f', os.O_WRONLY | os.O_CREAT); os.write(f, b'abc'); "
    "os.utime(f, ns=(5 * 10**9, 7 * 10**9));"
    "killed(); assert os.fstat(f).st_mtime_ns == 7 * 10**9; os.close(f); killed(); assert "
    "os.stat('f').st_mtime_ns == 7 * 10**9",
    "several openers": "w = os.open('f', os.O_WRONLY | os.O_CREAT); r = os.open('f', "
    "os.O_RDONLY); os.write(w, b'abc'); killed();"
    "r2 = os.open('f', os.O_RDONLY); os.write(w, b'def'); killed(); w2 = os.open('f', "
    "os.O_WRONLY); os.pwrite(w2, b'X', 0);"
    "assert [os.pread(x, 9, 0) for x in (r, r2)] == [b'Xbcdef'] * 2",
    "the working directory, and names": "os.makedirs('a/b/c'); os.chdir('a/b'); open('c/f', "
    "'w').write('x'); killed();"
    "os.rename('c', '../d'); killed(); assert content('../d/f') == b'x'; os.chdir('..'); "
    "os.rename('b', 'e');"
    "assert sorted(os.listdir()) == ['d', 'e']",
}


@pytest.mark.parametrize("text", PROGRAMS.values(), ids=list(PROGRAMS))
def test_what_is_open_goes_on(kept: Kept, text: str) -> None:
    kept.run(text, kills=text.count("killed()") * 10)


def test_files_of_the_backing_directory_go_on(kept: Kept) -> None:
    (kept.mount.backing / "d").mkdir()
    (kept.mount.backing / "d/f").write_bytes(b"abc" * 4000)
    kept.run(
        "os.chdir('d'); f = os.open('f', os.O_RDONLY); os.pread(f, 3, 0); n = "
        "os.fstat(f).st_ino; killed();"
        "assert os.pread(f, 12000, 0) == b'abc' * 4000; assert os.stat('f').st_ino == n; killed();"
        "g = os.open('f', os.O_RDONLY); w = os.open('f', os.O_WRONLY | os.O_APPEND); os.write(w, "
        "b'd'); killed(); os.write(w, b'e');"
        "assert content('f')[-3:] == b'cde'",
        kills=9,
    )


LOOKED_AT = """
names = sorted(os.listdir('data')); numbers = [os.stat('data/' + name).st_ino for name in names]
late = os.open('data/f0', os.O_RDONLY)
killed()
assert [os.stat('data/' + name).st_ino for name in names] == numbers
killed(); assert content('data/f1') == b'f1'
killed(); os.chmod('data/f2', 0o600); os.utime('data/f3', (5, 5)); os.truncate('data/f4', 1)
assert (os.stat('data/f2').st_mode & 0o777, os.stat('data/f3').st_mtime) == (0o600, 5.0)
assert content('data/f4') == b'f'
killed(); assert os.readlink('data/link') == 'f1'
assert os.waitstatus_to_exitcode(os.system('data/program')) == 5
killed(); os.link('data/f5', 'data/linked'); os.rename('data/f6', 'data/f7'); os.unlink('data/f8')
assert (content('data/linked'), content('data/f7')) == (b'f5', b'f6')
assert not os.path.exists('data/f8')
killed(); open('data/f9', 'r+b').write(b'X'); assert content('data/f9') == b'X9'
killed(); open('data/f1', 'wb').write(b'new'); assert content('data/f1') == b'new'
assert os.fstat(late).st_ino == numbers[names.index('f0')]; assert os.read(late, 9) == b'f0'
"""


@pytest.mark.clause("S204")
def test_files_that_were_only_looked_at_are_found_again(kept: Kept) -> None:
    """The next worker does not know them; the kernel, which does, asks for them by name again."""
    data = kept.mount.backing / "data"
    data.mkdir()
    for n in range(10):
        (data / f"f{n}").write_bytes(b"f%d" % n)
    (data / "link").symlink_to("f1")
    (data / "program").write_text("#!/bin/sh\nexit 5\n")
    (data / "program").chmod(0o755)
    kept.run(LOOKED_AT, kills=LOOKED_AT.count("killed()"))
