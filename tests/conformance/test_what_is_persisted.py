""" "Persisted" and "verified" are said of bytes that are on the storage, of nothing else: each way
to ask.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from acpfs import client
from acpfs.client import Durability
from acpfs.errors import AcpfsError, DeadlineError
from tests.rig.mounts import AcpfsMount, MakeMount

clause = pytest.mark.clause
pytestmark = pytest.mark.every_lane
SIZE = 1 << 20
KILLED = (
    "import os, sys; f = open(sys.argv[1], 'wb', 0); f.write(b'n' * (1 << 20)); "
    "os.kill(os.getpid(), 9)"
)


def asked(mount: AcpfsMount, *words: str) -> tuple[int, str]:
    done = mount.run("acpfs-ctl", str(mount.path), *words, check=False)
    return done.returncode, done.stderr


@pytest.fixture
def here(
    transport: str, make_mount: MakeMount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[AcpfsMount, Path]:
    """A mount that this process finds, and a directory of a checkpoint."""
    (tmp_path / "backing").mkdir()
    mount = make_mount(tmp_path / "backing", transport, max_dirty_age=0)
    directory = mount.path / "run" / "step-1"
    directory.mkdir(parents=True)
    mount.flush()
    monkeypatch.setenv("ACPFS_RUNTIME_DIR", str(mount.runtime_dir))
    return mount, directory


@clause("S392", "S285")
def test_a_file_is_not_persisted_while_it_is_written(here: tuple[AcpfsMount, Path]) -> None:
    mount, directory = here
    path = directory / "model.pt"
    with path.open("wb", buffering=0) as file:
        file.write(b"n" * SIZE)
        for words in (
            ("wait", str(path), "--timeout", "0"),
            ("wait", "--verified", str(path), "--timeout", "0"),
            ("wait", str(directory), "--timeout", "0"),
            ("flush", str(directory)),
        ):
            code, said = asked(mount, *words)
            assert code == 4, words
            assert "run/step-1/model.pt is being written" in said
        assert client.durability(path) is Durability.RAM
        with pytest.raises(DeadlineError):
            client.wait_persisted(path, 0.0)
        os.fsync(file.fileno())
        client.wait_persisted(path, 60)
        assert (mount.backing / "run/step-1/model.pt").read_bytes() == b"n" * SIZE
        file.write(b"m" * SIZE)
        waiting = threading.Thread(target=client.wait_persisted, args=(path, 120))
        waiting.start()
    waiting.join(240)
    assert not waiting.is_alive()
    assert (mount.backing / "run/step-1/model.pt").read_bytes() == b"n" * SIZE + b"m" * SIZE


@clause("S392", "S285")
def test_nor_is_one_whose_writer_was_killed(here: tuple[AcpfsMount, Path]) -> None:
    mount, directory = here
    path = directory / "model.pt"
    subprocess.run([sys.executable, "-S", "-c", KILLED, str(path)], check=False)
    assert mount.wait_status(lambda status: status["open_files"] == 0)
    for words in (
        ("wait", str(path)),
        ("wait", "--verified", str(path)),
        ("wait", str(directory), "--timeout", "0"),
        ("wait", "--count", "1", str(directory)),
        ("flush", str(mount.path / "run")),
    ):
        code, said = asked(mount, *words)
        assert code == 1, words
        assert "run/step-1/model.pt is interrupted" in said
    with pytest.raises(AcpfsError, match="interrupted"):
        client.durability(path)
    (checkpoint,) = mount.ask("checkpoints")["items"]
    assert checkpoint["state"] == "interrupted"
    mount.run("acpfs-ctl", "retry", str(path))
    client.wait_persisted(path, 60)
    assert (mount.backing / "run/step-1/model.pt").read_bytes() == b"n" * SIZE


@clause("S475")
def test_what_was_changed_through_a_mapping_is_persisted_when_it_is_said_to_be_after_msync(
    here: tuple[AcpfsMount, Path],
) -> None:
    mount, directory = here
    path = directory / "model.bin"
    path.write_bytes(b"o" * SIZE)
    client.wait_persisted(path, 60)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        for content in (b"n", b"m"):
            mapped[:] = content * SIZE
            mapped.flush()
            client.wait_persisted(path, 60)
            assert (mount.backing / "run/step-1/model.bin").read_bytes() == content * SIZE


@clause("S475")
def test_nor_is_what_is_changed_through_a_mapping_beside_a_writer(
    here: tuple[AcpfsMount, Path],
) -> None:
    """In passthrough that is one of the tier file, and the second change of a page leaves no
    trace.
    """
    mount, directory = here
    path = directory / "model.bin"
    path.write_bytes(b"o" * SIZE)
    client.wait_persisted(path, 60)
    with (
        path.open("ab") as _writer,
        path.open("r+b") as file,
        mmap.mmap(file.fileno(), 0) as mapped,
    ):
        for number in range(3):
            mapped[:10] = b"%010d" % number
            assert client.durability(path) is Durability.RAM
            os.fsync(file.fileno())
            mount.wait_drained()
    client.wait_persisted(path, 60)
    assert (mount.backing / "run/step-1/model.bin").read_bytes()[:10] == b"%010d" % 2


@clause("S475")
def test_nor_is_what_was_changed_through_a_mapping_and_is_known_to_the_kernel_alone(
    here: tuple[AcpfsMount, Path],
) -> None:
    mount, directory = here
    path = directory / "model.bin"
    path.write_bytes(b"o" * SIZE)
    client.wait_persisted(path, 60)
    file = path.open("r+b")
    with mmap.mmap(file.fileno(), 0) as mapped:
        file.close()  # the mapping has a descriptor of its own
        client.wait_persisted(path, 60)  # nothing was changed yet
        asks: tuple[Callable[[], None], ...] = (
            partial(client.wait_persisted, path, 0.0),
            partial(client.wait_verified, directory, 0.0),
            partial(client.wait_persisted, directory, 0.0, count=1),
            partial(mount.flush, "run"),
        )
        for number, ask in enumerate(asks):
            mapped[:10] = b"%010d" % number
            with pytest.raises(DeadlineError, match=r"being written|files are persisted|in time"):
                ask()
            mapped.flush()
            client.wait_persisted(path, 60)
        mapped[:10] = b"n" * 10
        assert client.durability(path) is Durability.RAM
    client.wait_persisted(path, 60)
    stored = (mount.backing / "run/step-1/model.bin").read_bytes()
    assert stored == b"n" * 10 + b"o" * (SIZE - 10)


@clause("S392", "S285")
def test_a_file_is_asked_for_by_any_of_its_names(here: tuple[AcpfsMount, Path]) -> None:
    """By one that it was given by a link, or that another file had before."""
    mount, directory = here
    first = directory / "model.pt"
    second = directory.parent / "best.pt"
    stored = mount.backing / "run" / "best.pt"
    first.write_bytes(b"old")
    mount.flush()
    mount.ctl("set", "bandwidth=1")
    (mount.path / "in_front").write_bytes(os.urandom(SIZE))
    os.link(first, second)
    assert asked(mount, "wait", str(second), "--timeout", "0")[0] == 4
    assert client.durability(second) is Durability.RAM
    second.write_bytes(b"new")
    assert asked(mount, "wait", str(second.parent), "--timeout", "0")[0] == 4
    assert asked(mount, "wait", str(second), "--timeout", "0")[0] == 4
    assert client.durability(second) is Durability.RAM
    mount.ctl("set", "bandwidth=0")
    client.wait_persisted(second, 60)
    assert stored.read_bytes() == b"new"


@clause("S16", "S468")
def test_a_sync_by_one_who_reads_fixes_what_others_wrote(here: tuple[AcpfsMount, Path]) -> None:
    mount, directory = here
    path = directory / "model.pt"
    stored = mount.backing / "run" / "step-1" / "model.pt"
    os.setxattr(directory, "user.acpfs.fsync", b"durable")
    with path.open("wb", buffering=0) as file:
        file.write(b"a" * SIZE)
        os.fsync(file.fileno())
        with path.open("rb") as reader:
            file.write(b"b" * SIZE)
            os.fsync(reader.fileno())
            assert stored.read_bytes() == b"a" * SIZE + b"b" * SIZE
