"""Metrics are the status's numbers under stable names."""

import socket
import urllib.request
from pathlib import Path

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from acpfs.control.metrics import Metrics
from tests.control.double import DoubleSubject


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


def test_every_number_of_the_status_is_a_metric(metrics: Metrics) -> None:
    found = values(metrics.text())
    assert found["acpfs_ram_dirty_bytes"] == 3
    assert found["acpfs_oldest_unpersisted_age_seconds"] == 1.5
    assert found["acpfs_retries_total"] == 7
    assert 'acpfs_backing_health{mount="/mnt/x",node="n",state="ok"} 1.0' in metrics.text()


def test_the_textfile_is_replaced_whole(metrics: Metrics, tmp_path: Path) -> None:
    file = tmp_path / "acpfs.prom"
    file.write_text("old")
    metrics.write(file)
    assert values(file.read_text())["acpfs_ram_used_bytes"] == 4
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.clause("S303")
def test_http_serves_on_localhost_only(metrics: Metrics) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    stop = metrics.start_http(port, "127.0.0.1")
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            assert b"acpfs_ram_used_bytes" in answer.read()
    finally:
        stop()


@pytest.mark.clause("S303")
@pytest.mark.parametrize(("asked", "other"), [("127.0.0.2", "127.0.0.1"), ("127.0.0.1", "127.0.0.2")])
def test_http_serves_at_the_address_that_was_named_alone(metrics: Metrics, asked: str, other: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    stop = metrics.start_http(port, asked)
    try:
        with urllib.request.urlopen(f"http://{asked}:{port}/metrics", timeout=5) as answer:
            assert b"acpfs_ram_used_bytes" in answer.read()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, port), timeout=5)
    finally:
        stop()
