"""Debian's Prometheus beside a mount: it scrapes every second, and has the printed alert rules."""

from __future__ import annotations

import json
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner

from acpfs.cli.deploy import command
from tests.rig.ports import free_port
from tests.rig.storage.servers import until

LIMIT_S = 120.0


class Prometheus:
    """A running one; `ask` is a query at this instant."""

    def __init__(self, port: int) -> None:
        self._address = f"http://127.0.0.1:{port}"

    def get(self, path: str, **words: str) -> Any:
        with urllib.request.urlopen(
            f"{self._address}{path}?{urllib.parse.urlencode(words)}", timeout=10
        ) as answer:
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
        return {
            alert["labels"]["alertname"]
            for alert in self.get("/api/v1/alerts")["alerts"]
            if alert["state"] == "firing"
        }


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
    words = [
        f"--config.file={top / 'prometheus.yaml'}",
        f"--storage.tsdb.path={top / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with open(top / "prometheus.log", "wb") as log:
        process = subprocess.Popen(["prometheus", *words], stdout=log, stderr=log, cwd=top)
    try:
        found = Prometheus(port)
        until(found.is_ready, "Prometheus is ready", LIMIT_S)
        yield found
    finally:
        process.kill()
        process.wait(60)
