"""Opens that wait for what another node has closed and is still draining (`wait_for_peers`).

Real mounts.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from acpfs.backing.member_records import NodeRecord
from acpfs.backing.name_filter import NameFilter
from tests.cluster import ranks
from tests.cluster.stand import HEARTBEAT_S, SOON_MISSING_S, Stand
from tests.rig.mounts import AcpfsMount, wait_gone

clause = pytest.mark.clause
pytestmark = [pytest.mark.mount, pytest.mark.transports("native")]
BOTH = pytest.mark.transports("libfuse", "native")
SHARD = b"shard" * 1000
PENDING = 3
"""Operations: a file, a directory, and a file in that."""
DIRECTORY = "iter_0000001"
NAME = "shard1.bin"
LATE = "iter_0000002"


@contextmanager
def stand(
    tmp_path: Path, transport: str, wait_for_peers: float = 600, node_timeout: float = 120
) -> Iterator[Stand]:
    """Two nodes with a directory of both; the second one has closed what it cannot persist, and the
    first one knows.
    """
    shared = tmp_path / "shared"
    (shared / DIRECTORY).mkdir(parents=True)
    with Stand(
        tmp_path,
        [shared] * 2,
        transport,
        wait_for_peers=wait_for_peers,
        attr_timeout=60,
        node_timeout=node_timeout,
    ) as two:
        first, second = two.nodes
        second.ask("set", key="bandwidth", value="1")
        (second.path / DIRECTORY / NAME).write_bytes(SHARD)
        (second.path / LATE).mkdir()
        (second.path / LATE / NAME).write_bytes(SHARD)
        knows(first, second, shared)
        yield two
        goes_on(second)


def told(shared: Path, node: str) -> NameFilter | None:
    return NameFilter.from_text(
        NodeRecord.from_bytes((shared / ".acpfs" / "nodes" / node).read_bytes()).pending
    )


def knows(first: AcpfsMount, second: AcpfsMount, shared: Path) -> None:
    """The second one's record says so, and the first one has read it."""

    def says(_status: object) -> bool:
        names = told(shared, "node1")
        return (
            names is not None
            and names.may_have(DIRECTORY.encode(), NAME.encode())
            and names.may_have(LATE.encode(), NAME.encode())
        )

    def has_heard(
        _status: object,
    ) -> (
        bool
    ):  # one question is not enough: on a busy machine it is answered before the records are read
        return any(
            report["node"] == "node1" and report["operations"] >= PENDING
            for report in first.ask("nodes")["nodes"]
        )

    second.wait_status(says)
    first.wait_status(has_heard)


def waits(node: AcpfsMount, *paths: str) -> None:
    node.wait_status(lambda status: status["cluster"]["awaited"] == sorted(paths))


def goes_on(node: AcpfsMount) -> None:
    node.ask("set", key="bandwidth", value="0")


@contextmanager
def opened(node: AcpfsMount, *paths: Path) -> Iterator[list[Future[bytes]]]:
    """Opened and read by a thread each, which wait.

    One after the other: over libfuse a lookup that waits holds up its directory (X12).
    """
    with ThreadPoolExecutor(len(paths)) as readers:
        found = []
        awaited = list[str]()
        for path in paths:
            found.append(readers.submit((node.path / path).read_bytes))
            awaited.append(str(path) if path.parent.name == DIRECTORY else path.parent.name)
            waits(node, *awaited)
        yield found


@clause("S172")
@BOTH
def test_an_open_waits_for_what_another_node_still_drains(transport: str, tmp_path: Path) -> None:
    """A file, and one in a directory that is not there either; meanwhile everything elsewhere goes
    on.
    """
    with stand(tmp_path, transport) as two:
        first, second = two.nodes
        (first.path / "mine").mkdir()
        with opened(first, Path(DIRECTORY, NAME), Path(LATE, NAME)) as found:
            (first.path / "mine" / "file").write_bytes(b"x")
            assert (first.path / "mine" / "file").read_bytes() == b"x"
            assert not any(one.done() for one in found)
            goes_on(second)
            assert [one.result() for one in found] == [SHARD] * 2
        counters = first.status()["counters"]
        assert (counters["name_waits"] >= 2, counters["name_waits_in_vain"]) == (True, 0)


@clause("S172", "X12")
@BOTH
def test_a_lookup_that_waits_holds_up_its_directory_over_libfuse_only(
    transport: str, tmp_path: Path
) -> None:
    """The kernel asks libfuse for one name of a directory at a time.

    What it knows already, and other directories, go on.
    """
    with stand(tmp_path, transport) as two, ThreadPoolExecutor(1) as another:
        first, second = two.nodes
        (first.path / "mine").mkdir()
        with opened(first, Path(LATE, NAME)) as (found,):
            (first.path / "mine" / "file").write_bytes(b"x")
            beside = another.submit((first.path / DIRECTORY / NAME).read_bytes)
            waits(first, *([f"{DIRECTORY}/{NAME}", LATE] if transport == "native" else [LATE]))
            goes_on(second)
            assert (found.result(), beside.result()) == (SHARD, SHARD)


@clause("S172")
def test_a_name_that_no_node_has_is_not_waited_for(transport: str, tmp_path: Path) -> None:
    with stand(tmp_path, transport, wait_for_peers=60) as two:
        first = two.nodes[0]
        for number in range(50):
            with pytest.raises(FileNotFoundError):
                (first.path / DIRECTORY / f"other{number}").read_bytes()
            (first.path / DIRECTORY / f"new{number}").write_bytes(b"x")
        assert first.status()["counters"]["name_waits"] <= 1, (
            "one in 2,000 is mistaken for one that is pending"
        )


@clause("S172")
def test_the_time_is_bounded_and_can_be_changed_in_use(transport: str, tmp_path: Path) -> None:
    with stand(tmp_path, transport, wait_for_peers=4 * HEARTBEAT_S) as two:
        first = two.nodes[0]
        with pytest.raises(FileNotFoundError):
            (first.path / DIRECTORY / NAME).read_bytes()
        assert first.status()["counters"]["name_waits_in_vain"] == 1
        first.ask("set", key="wait_for_peers", value="600")
        with opened(first, Path(LATE, NAME)) as (found,):
            first.ask("set", key="wait_for_peers", value="0")
            with pytest.raises(FileNotFoundError):
                found.result()
        before = first.status()["counters"][
            "name_waits"
        ]  # 2, or 1: it is awaited from its first look on, and that may have been its last
        with pytest.raises(FileNotFoundError):
            (first.path / DIRECTORY / NAME).read_bytes()
        assert first.status()["counters"]["name_waits"] == before


@clause("S172")
def test_a_node_that_dies_is_waited_for_until_it_counts_as_missing(
    transport: str, tmp_path: Path
) -> None:
    with stand(tmp_path, transport, wait_for_peers=600, node_timeout=SOON_MISSING_S) as two:
        first, second = two.nodes
        with opened(first, Path(DIRECTORY, NAME)) as (found,):
            second.kill()
            with pytest.raises(FileNotFoundError):
                found.result()
        second.start()
        goes_on(second)
        second.flush()
        first.ask("wait_nodes", timeout_s=None)
        assert (first.path / DIRECTORY / NAME).read_bytes() == SHARD


@clause("S172")
@pytest.mark.transports("native")
@pytest.mark.parametrize("whose", [0, 1])
def test_a_wait_goes_on_over_the_end_of_a_worker(
    transport: str, tmp_path: Path, whose: int
) -> None:
    """Of the node that waits: the kernel asks the next one.

    Of the one that is waited for: the next one's first record says the same.
    """
    with stand(tmp_path, transport) as two:
        first, second = two.nodes
        with opened(first, Path(DIRECTORY, NAME)) as (found,):
            killed = two.nodes[whose].kill_worker()
            two.nodes[whose].wait_status(lambda status: status["worker"]["pid"] != killed)
            if whose:
                seen = two.nodes[1].status()["counters"]["node_records_written"]
                two.nodes[1].wait_status(
                    lambda status: status["counters"]["node_records_written"] > seen + 1
                )
            waits(first, f"{DIRECTORY}/{NAME}")
            assert not found.done()
            goes_on(second)
            assert found.result() == SHARD


@clause("S172")
@pytest.mark.transports("native")
def test_a_program_that_waits_can_be_killed(transport: str, tmp_path: Path) -> None:
    with stand(tmp_path, transport) as two:
        first = two.nodes[0]
        program = subprocess.Popen(
            [sys.executable, "-c", "import sys; open(sys.argv[1])", first.path / DIRECTORY / NAME]
        )
        waits(first, f"{DIRECTORY}/{NAME}")
        program.kill()
        wait_gone(program.pid)
        program.wait()
        waits(first)
        (first.path / DIRECTORY / "beside").write_bytes(b"x")


@clause("S172")
@pytest.mark.long
@pytest.mark.frameworks
@pytest.mark.skipif(
    ranks.torch_python() is None,
    reason=f"{ranks.PYTHON_VARIABLE} names no interpreter that has torch; tools/test sets it",
)
def test_stock_dcp_loads_what_all_nodes_still_drain(transport: str, tmp_path: Path) -> None:
    """All ranks read all files, with the stock reader, and none of these is persisted yet when they
    begin.
    """
    shared = tmp_path / "shared"
    shared.mkdir()
    with Stand(tmp_path, [shared] * 2, transport, attr_timeout=60) as two:
        job = ranks.RankJob(two.paths(), "dcp", tmp_path / "ranks.log")
        try:
            job.enter()
            for node in two.nodes:
                node.ask("set", key="bandwidth", value="1")
            job.save()
        finally:
            job.close()
        assert not list(shared.glob("iter_*/*")), "nothing of it is there yet"
        for node, name in zip(two.nodes, (".metadata", "__1_0.distcp"), strict=True):
            node.wait_status(
                lambda _status, node=node, name=name: is_told(shared, node, f"{job.name}/{name}")
            )
        for node in two.nodes:
            node.ask("set", key="wait_for_peers", value="90")
            node.ask("nodes")
        loads = [loading(node.path, job.name) for node in two.nodes]
        for node in two.nodes:
            node.wait_status(lambda status: bool(status["cluster"]["awaited"]))
        for node in two.nodes:
            node.ask("set", key="bandwidth", value="200K")
        assert [load.communicate()[0][-300:] for load in loads] == ["", ""]


def is_told(shared: Path, node: AcpfsMount, path: str) -> bool:
    names = told(shared, str(node.options["node_id"]))
    return names is not None and names.may_have(*path.encode().rsplit(b"/", 1))


def loading(mountpoint: Path, name: str) -> subprocess.Popen[str]:
    """A restarted rank; what it says is what is wrong."""
    text = (
        "import sys; from pathlib import Path; from tests.cluster.torch_rank import "
        "wrong_with_dcp\n"
    )
    text += "sys.stdout.write(wrong_with_dcp(2, Path(sys.argv[1]), sys.argv[2]))"
    words = [str(ranks.torch_python()), "-c", text, str(mountpoint), name]
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, cwd=ranks.REPOSITORY, env=ranks.environment()
    )
