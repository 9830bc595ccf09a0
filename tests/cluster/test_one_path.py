"""One path that several nodes write (replicated state, config.json): whole files, the last commit
wins, equal bytes are sent once.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.stand import Stand
from tests.rig.mounts import AcpfsMount

clause = pytest.mark.clause
pytestmark = [pytest.mark.mount, pytest.mark.transports("native")]
BYTES = os.urandom(3 << 20)
OTHER = os.urandom(3 << 20)
NAME = "common.pt"


def equal_files(node: AcpfsMount) -> int:
    return int(node.status()["counters"]["equal_files"])


def knows_others(stand: Stand) -> None:
    for node in stand.nodes:
        node.wait_status(lambda status: status["cluster"]["nodes"] == len(stand.nodes) - 1)


def staged(shared: Path) -> list[str]:
    return [path.name for path in (shared / ".acpfs").rglob("linked-*")]


class Looks:
    """A reader of the backing directory, in a thread: everything it ever sees at one path."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.torn: list[bytes] = []
        self.whole = 0

    def __enter__(self) -> Looks:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.is_set():
            try:
                content = self._path.read_bytes()
            except FileNotFoundError:
                continue
            head = content[:4]
            if len(head) == 4 and content == version(int(head)):
                self.whole += 1
            else:
                self.torn.append(head)


def version(number: int) -> bytes:
    """Length and bytes by its number."""
    return b"%04d" % number * (1000 + 997 * number % 20_000)


@clause("S170")
def test_the_last_commit_wins_and_every_look_is_at_a_whole_file(
    transport: str, tmp_path: Path, shared: Path
) -> None:
    nodes = 3
    rounds = 12
    with (
        Stand(tmp_path, [shared] * nodes, transport) as stand,
        ThreadPoolExecutor(nodes) as ranks,
        Looks(shared / NAME) as looks,
    ):

        def rank(number: int) -> None:
            for turn in range(rounds):
                (stand.nodes[number].path / NAME).write_bytes(version(turn * nodes + number))
                stand.nodes[number].flush()

        list(ranks.map(rank, range(nodes)))
        last = int((shared / NAME).read_bytes()[:4])
        assert last // nodes == rounds - 1, "what was committed last is what somebody wrote last"
        (stand.nodes[0].path / NAME).write_bytes(version(9000))
        stand.nodes[0].flush()
        for node in stand.nodes:
            node.wait_status(
                lambda _status, node=node: (node.path / NAME).read_bytes() == version(9000)
            )
        assert (looks.torn, looks.whole > 0) == ([], True)


@clause("S171")
def test_equal_content_is_not_sent_twice(transport: str, tmp_path: Path, shared: Path) -> None:
    with Stand(tmp_path, [shared] * 2, transport) as stand:
        first, second = stand.nodes
        knows_others(stand)
        (first.path / NAME).write_bytes(BYTES)
        first.flush()
        stored = (shared / NAME).stat()
        streamed = second.status()["counters"]["streamed_bytes"]
        (second.path / NAME).write_bytes(BYTES)
        os.utime(second.path / NAME, (1, 1))
        second.flush()
        counters = second.status()["counters"]
        assert (counters["equal_files"], counters["equal_bytes"], counters["streamed_bytes"]) == (
            1,
            len(BYTES),
            streamed,
        )
        found = (shared / NAME).stat()
        assert (
            found.st_ino,
            found.st_nlink,
            found.st_mtime,
            (shared / NAME).read_bytes() == BYTES,
        ) == (stored.st_ino, 1, 1, True)
        assert [row["status"] for row in second.ctl("verify", str(second.path / NAME))] == ["ok"]
        (second.path / NAME).write_bytes(OTHER)
        second.flush()
        assert ((shared / NAME).read_bytes() == OTHER, equal_files(second), staged(shared)) == (
            True,
            1,
            [],
        )


@clause("S171")
def test_what_only_looks_equal_is_sent(transport: str, tmp_path: Path, shared: Path) -> None:
    """Of the same size; or of the same bytes, with a checksum noted at it, but written to natively
    since.
    """
    with Stand(tmp_path, [shared] * 2, transport) as stand:
        first, second = stand.nodes
        knows_others(stand)
        for name in ("a", "b"):
            (first.path / name).write_bytes(BYTES)
        first.flush()
        with open(shared / "b", "r+b") as native:
            native.write(b"native")
        (second.path / "a").write_bytes(OTHER)
        (second.path / "b").write_bytes(BYTES)
        second.flush()
        assert (
            (shared / "a").read_bytes() == OTHER,
            (shared / "b").read_bytes() == BYTES,
            equal_files(second),
        ) == (True, True, 0)


def held_back(stand: Stand) -> None:
    """The second node has linked the first one's file, and may not commit before the first has
    drained.
    """
    first, second = stand.nodes
    knows_others(stand)
    (first.path / NAME).write_bytes(BYTES)
    first.flush()
    first.ask("set", key="bandwidth", value="1")
    (first.path / "behind").write_bytes(OTHER)
    (second.path / NAME).write_bytes(BYTES)
    second.wait_status(lambda status: status["counters"]["equal_files"] == 1)
    assert len(staged(stand.backings[0])) == 1


@clause("S171", "S81")
@pytest.mark.parametrize("death", ["worker", "all"])
def test_a_crash_between_link_and_commit_loses_and_leaves_nothing(
    transport: str, tmp_path: Path, shared: Path, death: str
) -> None:
    with Stand(tmp_path, [shared] * 2, transport, cluster_order="all") as stand:
        first, second = stand.nodes
        held_back(stand)
        if death == "worker":
            second.kill_worker()
        else:
            second.kill()
            second.start()
        first.ask("set", key="bandwidth", value="0")
        second.flush()
        assert (
            (shared / NAME).read_bytes() == BYTES,
            (shared / NAME).stat().st_nlink,
            staged(shared),
        ) == (True, 1, [])


@clause("S171")
@pytest.mark.parametrize("change", ["written into", "replaced", "removed"])
def test_what_becomes_of_the_other_file_meanwhile_does_not_matter(
    transport: str, tmp_path: Path, shared: Path, change: str
) -> None:
    with Stand(tmp_path, [shared] * 2, transport, cluster_order="all") as stand:
        first, second = stand.nodes
        held_back(stand)
        if change == "written into":
            with open(shared / NAME, "r+b") as native:
                native.write(b"native")
        elif change == "replaced":
            (shared / "new").write_bytes(OTHER)
            (shared / "new").replace(shared / NAME)
        else:
            (shared / NAME).unlink()
        first.ask("set", key="bandwidth", value="0")
        second.flush()
        assert (
            (shared / NAME).read_bytes() == BYTES,
            (shared / NAME).stat().st_nlink,
            staged(shared),
        ) == (True, 1, [])
