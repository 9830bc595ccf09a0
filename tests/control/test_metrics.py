"""Metrics are the status's numbers under stable names."""

import ctypes
import os
import socket
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from acpfs.config import Settings
from acpfs.control import metric_table
from acpfs.control.metrics import Metrics, is_bound_to, listen_for_scrapes
from acpfs.runtime.threads import Threads
from acpfs.worker import metrics_tasks
from acpfs.worker.metrics_tasks import MetricsTasks
from tests.control.double import DoubleSubject
from tests.rig.ports import free_port

CLONE_NEWNET = 0x40000000


@pytest.fixture
def metrics() -> Metrics:
    async def make() -> DoubleSubject:
        return DoubleSubject()

    return Metrics(trio.run(make).status)


def values(text: str) -> dict[str, float]:
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "state" not in sample.labels
    }


@pytest.mark.clause("S320")
def test_every_number_of_the_status_is_a_metric(metrics: Metrics) -> None:
    found = values(metrics.text())
    assert found["acpfs_ram_dirty_bytes"] == 3
    assert found["acpfs_oldest_unpersisted_age_seconds"] == 1.5
    assert found["acpfs_retries_total"] == 7
    assert 'acpfs_backing_health{mount="/mnt/x",node="n",state="ok"} 1.0' in metrics.text()


@pytest.mark.clause("S320")
def test_what_is_exposed_is_in_the_table(metrics: Metrics) -> None:
    families = {family.name: family for family in text_string_to_metric_families(metrics.text())}
    described = {row.name.removesuffix("_total"): row for row in metric_table.rows()}
    assert set(families) <= set(described)
    assert {name: family.type for name, family in families.items()} == {
        name: described[name].kind.value for name in families
    }
    absent = {
        name
        for name in described
        if name not in families and described[name].kind is not metric_table.MetricKind.COUNTER
    }
    assert all(
        any(
            word in name
            for word in ("spill", "mirror", "node", "pointers", "awaited", "clock", "copies")
        )
        for name in absent
    )
    assert all(
        set(sample.labels) >= {"mount", "node"}
        for family in families.values()
        for sample in family.samples
    )


@pytest.mark.clause("S320")
def test_a_histogram_adds_up_from_bucket_to_bucket(metrics: Metrics) -> None:
    text = metrics.text()
    assert 'acpfs_file_save_seconds_bucket{le="0.1",mount="/mnt/x",node="n"} 2.0' in text
    assert 'acpfs_file_save_seconds_bucket{le="+Inf",mount="/mnt/x",node="n"} 5.0' in text
    assert values(text)["acpfs_file_save_seconds_sum"] == 7.5


def test_the_textfile_is_replaced_whole(metrics: Metrics, tmp_path: Path) -> None:
    file = tmp_path / "acpfs.prom"
    file.write_text("old")
    metrics.write(file)
    assert values(file.read_text())["acpfs_ram_used_bytes"] == 4
    assert list(tmp_path.iterdir()) == [file]


@contextmanager
def listening(metrics: Metrics, port: int, address: str) -> Iterator[None]:
    with listen_for_scrapes(port, address) as bound:
        stop = metrics.serve_http(bound, Threads())
        try:
            yield
        finally:
            stop()


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "localhost", "::1"])
def test_a_socket_that_was_kept_is_known_by_its_address(address: str) -> None:
    port = free_port()
    with listen_for_scrapes(port, address) as bound:
        assert is_bound_to(bound, port, address)
        assert not is_bound_to(bound, port + 1, address)
        assert not is_bound_to(bound, port, "127.0.0.2")


@pytest.mark.clause("S621")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to have another network")
def test_a_socket_of_another_network_is_not_that_one() -> None:
    """As of the container that had the mount before."""
    port = free_port()

    def listen_elsewhere() -> socket.socket:
        assert ctypes.CDLL(None).unshare(CLONE_NEWNET) == 0  # of this thread alone
        return listen_for_scrapes(port, "0.0.0.0")

    with ThreadPoolExecutor(1) as pool, pool.submit(listen_elsewhere).result() as bound:
        assert not is_bound_to(bound, port, "0.0.0.0")


@pytest.mark.clause("S621")
def test_with_another_address_the_socket_that_was_kept_is_let_go(
    metrics: Metrics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the same port, which was never free."""
    monkeypatch.setattr(metrics_tasks, "AGAIN_S", 0.01)
    port = free_port()
    kept = [listen_for_scrapes(port, "127.0.0.1").detach()]
    supervisors = [os.dup(kept[0])]
    served_anew = trio.Event()

    def keep(fds: Sequence[int]) -> None:
        while supervisors:
            os.close(supervisors.pop())
        supervisors.extend(map(os.dup, fds))
        if fds:
            served_anew.set()

    settings = Settings(
        backing=tmp_path, mountpoint=tmp_path / "mnt", metrics_port=port, metrics_address="0.0.0.0"
    )
    tasks = MetricsTasks(settings, metrics, Threads(), kept, keep, taken_over=True)

    async def take_over() -> bytes:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                await nursery.start(tasks.serve)
                await served_anew.wait()
                answer = await trio.to_thread.run_sync(ask)
                nursery.cancel_scope.cancel()
        return answer

    def ask() -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            return bytes(answer.read())

    assert b"acpfs_ram_used_bytes" in trio.run(take_over)
    with socket.socket(fileno=supervisors.pop()) as next_ones:
        assert is_bound_to(next_ones, port, "0.0.0.0")


@pytest.mark.clause("S303")
def test_http_serves_on_localhost_only(metrics: Metrics) -> None:
    port = free_port()
    with (
        listening(metrics, port, "127.0.0.1"),
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer,
    ):
        assert b"acpfs_ram_used_bytes" in answer.read()


@pytest.mark.clause("S303")
@pytest.mark.parametrize(
    ("asked", "other"), [("127.0.0.2", "127.0.0.1"), ("127.0.0.1", "127.0.0.2")]
)
def test_http_serves_at_the_address_that_was_named_alone(
    metrics: Metrics, asked: str, other: str
) -> None:
    port = free_port()
    with listening(metrics, port, asked):
        with urllib.request.urlopen(f"http://{asked}:{port}/metrics", timeout=60) as answer:
            assert b"acpfs_ram_used_bytes" in answer.read()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, port), timeout=60)
