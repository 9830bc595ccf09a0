"""Metrics are the status's numbers under stable names."""

import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from acpfs.control import metric_table
from acpfs.control.metrics import Metrics, is_bound_to, listen_for_scrapes
from acpfs.runtime.threads import Threads
from tests.control.double import DoubleSubject
from tests.rig.ports import free_port


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
