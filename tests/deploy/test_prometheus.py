"""A real Prometheus scrapes a real mount, and an alert fires for a storage that stands still, and ends with it."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from acpfs.cli.deploy import command
from acpfs.control import metric_table
from tests.deploy.slurm_rig import wait_for
from tests.rig.faultfs import FaultFs
from tests.rig.mounts import MakeMount
from tests.rig.ports import free_port

LIMIT_S = 120.0
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's prometheus"),
]


class Prometheus:
    """A running one; `ask` is a query at this instant."""

    def __init__(self, port: int) -> None:
        self._address = f"http://127.0.0.1:{port}"

    def get(self, path: str, **words: str) -> Any:
        with urllib.request.urlopen(f"{self._address}{path}?{urllib.parse.urlencode(words)}", timeout=10) as answer:
            return json.load(answer)["data"]

    def ask(self, query: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("/api/v1/query", query=query)["result"]
        return found

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._address}/-/ready", timeout=10) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def firing(self) -> set[str]:
        return {alert["labels"]["alertname"] for alert in self.get("/api/v1/alerts")["alerts"] if alert["state"] == "firing"}


def alert_rules() -> str:
    """As printed, but for how long a condition has to last: a second in place of minutes."""
    done = CliRunner().invoke(command, ["alerts", "--unpersisted", "5s"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    printed = yaml.safe_load(done.stdout)
    for rule in printed["groups"][0]["rules"]:
        rule["for"] = "1s"
    return str(yaml.safe_dump(printed))


@contextmanager
def prometheus(top: Path, metrics_port: int) -> Iterator[Prometheus]:
    port = free_port()
    (top / "alerts.yaml").write_text(alert_rules())
    scrape = {"job_name": "acpfs", "static_configs": [{"targets": [f"127.0.0.1:{metrics_port}"]}]}
    configuration = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["alerts.yaml"],
        "scrape_configs": [scrape],
    }
    (top / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
    words = [f"--config.file={top / 'prometheus.yaml'}", f"--storage.tsdb.path={top / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    with open(top / "prometheus.log", "wb") as log:
        process = subprocess.Popen(["prometheus", *words], stdout=log, stderr=log, cwd=top)
    try:
        found = Prometheus(port)
        wait_for("Prometheus is ready", found.is_ready, LIMIT_S)
        yield found
    finally:
        process.kill()
        process.wait(60)


@pytest.mark.clause("S320", "S321")
def test_a_storage_that_stands_still_fires_and_one_that_goes_on_does_not(make_mount: MakeMount, fault_fs: FaultFs, tmp_path: Path) -> None:
    metrics_port = free_port()
    mount = make_mount(fault_fs.path, "native", metrics_port=metrics_port)
    (tmp_path / "prometheus").mkdir()
    with prometheus(tmp_path / "prometheus", metrics_port) as watching:
        wait_for("the mount is scraped", lambda: watching.ask('up{job="acpfs"} == 1'), LIMIT_S)
        (series,) = watching.ask("acpfs_ram_budget_bytes")
        assert series["metric"]["mount"] == str(mount.path)
        known = set(watching.get("/api/v1/label/__name__/values"))
        absent = {name for name in metric_table.GAUGES if f"{metric_table.PREFIX}{name}" not in known}
        assert all(name.startswith(("spill_", "mirror_")) for name in absent), "all but what this mount does not have is scraped"
        assert watching.firing() == set()

        fault_fs.freeze(["write", "rename"])
        (mount.path / "model.pt").write_bytes(b"x" * (1 << 20))
        wait_for("both alerts fire", lambda: watching.firing() >= {"AcpfsBackingStuck", "AcpfsUnpersistedTooOld"}, LIMIT_S)

        fault_fs.thaw()
        mount.wait_drained()
        wait_for("no alert is left", lambda: watching.firing() == set(), LIMIT_S)
        (persisted,) = watching.ask("acpfs_persisted_bytes_total")
        assert float(persisted["value"][1]) >= 1 << 20
