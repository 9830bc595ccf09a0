"""What `acpfs deploy dashboard` and `alerts` print: valid, and of metrics that exist; promtool
judges the rules where it is installed.

With it they are long: Debian's package is 19 MB for two tests of texts that seldom change;
`tools/test cli` installs it.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from acpfs.cli.deploy import command
from acpfs.control import metric_table

OPERATIONS = Path(__file__).parents[2] / "docs/OPERATIONS.md"
SERIES = re.compile(r"\bacpfs_\w+")


def printed(*words: str) -> str:
    done = CliRunner().invoke(command, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def queries(panels: list[dict[str, Any]]) -> Iterator[str]:
    return (target["expr"] for panel in panels for target in panel.get("targets", []))


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(printed("alerts"))["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def lost(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """What Grafana's own classes do not know, or have otherwise."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [
            one
            for key in ours
            for one in (
                [f"{path}/{key}"]
                if key not in theirs
                else lost(ours[key], theirs[key], f"{path}/{key}")
            )
        ]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [
            one
            for number, (a, b) in enumerate(zip(ours, theirs, strict=True))
            for one in lost(a, b, f"{path}[{number}]")
        ]
    return [] if ours == theirs else [path]


@pytest.mark.clause("S321")
def test_grafana_knows_each_field_of_the_dashboard() -> None:
    """By the classes that Grafana generates from its schemas; Grafana itself can be had here from
    no package registry.
    """
    pytest.importorskip(
        "grafana_foundation_sdk",
        reason="grafana-foundation-sdk is not installed (it needs Python 3.11)",
    )
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard
    from grafana_foundation_sdk.models.prometheus import Dataquery

    def known(model: Any, ours: dict[str, Any]) -> list[str]:
        return lost(ours, json.loads(JSONEncoder().encode(model.from_json(ours))))

    drawn = json.loads(printed("dashboard"))
    assert known(Dashboard, drawn) == []
    targets = [target for panel in drawn["panels"] for target in panel.get("targets", [])]
    assert [known(Dataquery, target) for target in targets] == [[]] * len(targets)
    assert known(Dashboard, drawn | {"tittle": "x"}) == ["/tittle"]  # it does notice


@pytest.mark.clause("S321")
def test_no_panel_names_a_metric_that_does_not_exist() -> None:
    drawn = json.loads(printed("dashboard"))
    expressions = list(queries(drawn["panels"]))
    named = {name for expression in expressions for name in SERIES.findall(expression)}
    assert named - metric_table.series() == set()
    assert len(expressions) > 20
    assert all('mount=~"$mount",node=~"$node"' in expression for expression in expressions)
    assert all(expression.count("(") == expression.count(")") for expression in expressions)
    chosen = {
        variable["query"]["query"]
        for variable in drawn["templating"]["list"]
        if variable["type"] == "query"
    }
    assert {name for query in chosen for name in SERIES.findall(query)} <= metric_table.series()


def test_panels_lie_beside_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(printed("dashboard"))["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _y in cells) < 24
        taken |= cells


@pytest.mark.clause("S321")
def test_each_alert_names_metrics_that_exist_and_a_section_of_the_page() -> None:
    page = OPERATIONS.read_text(encoding="utf-8")
    headings = {
        line.removeprefix("#### ").lower()
        for line in page.splitlines()
        if line.startswith("#### Acpfs")
    }
    linked = set()
    for rule in rules():
        named = set(SERIES.findall(rule["expr"]))
        assert named, rule
        assert named - metric_table.series() == set()
        where, _, section = rule["annotations"]["runbook_url"].partition("#")
        assert where == "docs/OPERATIONS.md"
        assert section == rule["alert"].lower()
        linked.add(section)
    assert linked == headings


def test_bounds_and_the_page_s_address_are_options() -> None:
    text = printed(
        "alerts", "--unpersisted", "1h", "--wait", "90s", "--runbook", "https://wiki.example/acpfs"
    )
    assert "acpfs_oldest_unpersisted_age_seconds > 3600" in text
    assert "acpfs_longest_wait_seconds > 90" in text
    assert "https://wiki.example/acpfs#acpfsparked" in text


def unit_tests() -> dict[str, Any]:
    """One that fires and one that does not, for promtool."""
    labels = 'mount="/mnt/a",node="n"'
    series = {
        "acpfs_oldest_unpersisted_age_seconds": "0+60x60",
        'acpfs_backing_health{state="stuck"}': "0x10 1x50",
        "acpfs_parked_operations": "0x60",
        "acpfs_conflicts": "0x20 1x40",
        "acpfs_worker_start_time_seconds": "100x60",
        "acpfs_ram_dirty_bytes": "0+2x60",
        "acpfs_ram_budget_bytes": "100x60",
    }
    given = [
        {
            "series": f"{name[:-1]},{labels}}}" if name.endswith("}") else f"{name}{{{labels}}}",
            "values": values,
        }
        for name, values in series.items()
    ]
    fires = {
        "AcpfsUnpersistedTooOld": 40,
        "AcpfsBackingStuck": 20,
        "AcpfsConflicts": 30,
        "AcpfsDrainTooSlow": 50,
    }
    quiet = {
        "AcpfsUnpersistedTooOld": 10,
        "AcpfsBackingStuck": 5,
        "AcpfsParked": 60,
        "AcpfsWorkerDies": 60,
        "AcpfsDrainTooSlow": 20,
    }
    assert set(fires) | set(quiet) <= {rule["alert"] for rule in rules()}
    return {
        "rule_files": ["alerts.yaml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": given,
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}})',
                        "eval_time": f"{minute}m",
                        "exp_samples": samples,
                    }
                    for times, samples in ((fires, [{"labels": "{}", "value": 1}]), (quiet, []))
                    for name, minute in times.items()
                ],
            }
        ],
    }


def promtool(directory: Path, *words: str) -> str:
    done = subprocess.run(
        ["promtool", *words],
        check=False,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.clause("S321")
@pytest.mark.long
@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: prometheus)")
def test_prometheus_takes_the_rules_and_they_fire(tmp_path: Path) -> None:
    (tmp_path / "alerts.yaml").write_text(printed("alerts"))
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(unit_tests()))
    assert f"{len(rules())} rules found" in promtool(tmp_path, "check", "rules", "alerts.yaml")
    promtool(tmp_path, "test", "rules", "tests.yaml")


@pytest.mark.long
@pytest.mark.long
@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: prometheus)")
def test_each_query_of_the_dashboard_is_one(tmp_path: Path) -> None:
    expressions = [
        expression.replace("$__rate_interval", "5m")
        for expression in queries(json.loads(printed("dashboard"))["panels"])
    ]
    group = {
        "name": "q",
        "rules": [
            {"record": f"q:{number}", "expr": expression}
            for number, expression in enumerate(expressions)
        ],
    }
    (tmp_path / "queries.yaml").write_text(yaml.safe_dump({"groups": [group]}))
    promtool(tmp_path, "check", "rules", "queries.yaml")
