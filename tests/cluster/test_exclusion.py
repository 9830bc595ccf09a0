"""What two nodes grant at the same time: locks, and names that are to be made once."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from tests.cluster.stand import Stand

clause = pytest.mark.clause
pytestmark = [pytest.mark.mount, pytest.mark.transports("native")]


def exclusive(path: Path) -> int:
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)


@clause("S456", "S45")
def test_nodes_do_not_exclude_each_other(tmp_path: Path, shared: Path) -> None:
    with Stand(tmp_path, [shared, shared]) as stand:
        first, second = (node.path for node in stand.nodes)
        (first / "lock").write_bytes(b"")
        stand.nodes[0].flush()
        os.listdir(second)
        locked = [(path / "lock").open("r+b") for path in (first, second)]
        for file in locked:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with (first / "lock").open("r+b") as another, pytest.raises(OSError) as caught:
            fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert caught.value.errno == errno.EWOULDBLOCK
        for file in locked:
            file.close()
        # both are open at once: what is not closed yet has not come to the storage, where the other
        # one would find it
        made = [exclusive(path / "once") for path in (first, second)]
        with pytest.raises(FileExistsError):
            exclusive(first / "once")
        for fd, content in zip(made, (b"first", b"second"), strict=True):
            os.write(fd, content)
            os.close(fd)
        for node in stand.nodes:
            node.flush()
        assert (shared / "once").read_bytes() in (b"first", b"second")


@clause("S459")
def test_what_another_node_has_persisted_is_not_made_again(tmp_path: Path, shared: Path) -> None:
    """However young the knowledge is that it was not there."""
    with Stand(tmp_path, [shared, shared], attr_timeout=3600.0) as stand:
        first, second = (node.path for node in stand.nodes)
        for name in ("file", "directory", "above/below"):
            assert not (second / name).exists()
        os.close(exclusive(first / "file"))
        (first / "directory").mkdir()
        (first / "above/below").mkdir(parents=True)
        stand.nodes[0].flush()
        with pytest.raises(FileExistsError):
            exclusive(second / "file")
        with pytest.raises(FileExistsError):
            (second / "directory").mkdir()
        (second / "above/below").mkdir(parents=True, exist_ok=True)
        (second / "above/below/shard").write_bytes(b"shard")
        stand.nodes[1].flush()
        assert (shared / "above/below/shard").read_bytes() == b"shard"
