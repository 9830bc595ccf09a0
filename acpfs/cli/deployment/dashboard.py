"""`acpfs deploy dashboard`: a dashboard for Grafana, made from the table of metrics, so that no
panel names one that does not exist.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import click

from acpfs.control.metric_table import HEALTH_STATES, PREFIX

WIDTH = 24
HEIGHT = 8
"""Grafana's columns, and a panel's rows."""
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WHERE = 'mount=~"$mount",node=~"$node"'


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph, or with `is_stat` one number per mount."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    """(expression with `@` for the labels that choose mounts, what a line is called)."""
    text: str = ""
    is_stat: bool = False
    red_above: float | None = None


def _rate(name: str) -> str:
    return f"rate({PREFIX}{name}_total{{@}}[$__rate_interval])"


def _quantile(share: float, name: str) -> str:
    return (
        f"histogram_quantile({share}, sum by (le, mount) "
        f"(rate({PREFIX}{name}_seconds_bucket{{@}}[$__rate_interval])))"
    )


def _gauge(name: str) -> str:
    return f"{PREFIX}{name}{{@}}"


def _durations(title: str, name: str, text: str) -> Panel:
    return Panel(
        title,
        "s",
        tuple((_quantile(share, name), f"{share:.0%} {{{{mount}}}}") for share in (0.5, 0.99)),
        text,
    )


MEMBER = "{{node}} {{mount}}"
ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Is everything safe?",
        (
            Panel(
                "Oldest that is not persisted",
                "s",
                ((f"max({_gauge('oldest_unpersisted_age_seconds')})", ""),),
                is_stat=True,
                red_above=900,
            ),
            Panel(
                "Refused for good",
                "none",
                ((f"sum({_gauge('parked_operations')})", ""),),
                is_stat=True,
                red_above=1,
            ),
            Panel(
                "Writer lost",
                "none",
                ((f"sum({_gauge('interrupted_files')})", ""),),
                is_stat=True,
                red_above=1,
            ),
            Panel(
                "Pointers withheld",
                "none",
                ((f"sum({_gauge('withheld_pointers')})", ""),),
                is_stat=True,
                red_above=1,
            ),
            Panel(
                "Members missing",
                "none",
                ((f"max({_gauge('missing_nodes')})", ""),),
                is_stat=True,
                red_above=1,
            ),
            Panel(
                "Storage stuck or refusing",
                "none",
                ((f'sum({PREFIX}backing_health{{@,state=~"stuck|refusing"}})', ""),),
                is_stat=True,
                red_above=1,
            ),
        ),
    ),
    (
        "Saving",
        (
            _durations(
                "Save of a file", "file_save", "What training waits for: from open to close."
            ),
            _durations(
                "Until a file is persisted",
                "file_persist",
                "From its close until the storage has it.",
            ),
            Panel(
                "Age of the oldest that is not persisted",
                "s",
                ((_gauge("oldest_unpersisted_age_seconds"), MEMBER),),
            ),
        ),
    ),
    (
        "RAM and the drain",
        (
            Panel(
                "RAM tier",
                "bytes",
                (
                    (f"sum({_gauge('ram_dirty_bytes')})", "not persisted"),
                    (f"sum({_gauge('ram_clean_bytes')})", "clean"),
                    (f"sum({_gauge('ram_budget_bytes')})", "budget"),
                ),
            ),
            Panel(
                "Drain",
                "Bps",
                ((_rate("persisted_bytes"), MEMBER),),
                "Bytes that were persisted per second.",
            ),
            Panel(
                "Queue",
                "none",
                ((_gauge("queue_operations"), MEMBER),),
                "Operations that are not persisted.",
            ),
            Panel(
                "Waits for room",
                "s",
                ((_gauge("longest_wait_seconds"), MEMBER),),
                "How long the first writer has waited.",
            ),
        ),
    ),
    (
        "Storage",
        (
            Panel(
                "Health",
                "none",
                tuple(
                    (f'sum({PREFIX}backing_health{{@,state="{state}"}})', state)
                    for state in HEALTH_STATES
                ),
                "Mounts by the state of their storage.",
            ),
            Panel(
                "Oldest call",
                "s",
                ((_gauge("backing_oldest_call_seconds"), MEMBER),),
                "How long a call on the storage has been out.",
            ),
            Panel(
                "Tried again",
                "none",
                (
                    (_rate("retries"), f"retries {MEMBER}"),
                    (_rate("backing_timeouts"), f"no answer {MEMBER}"),
                ),
            ),
            Panel(
                "Wrong bytes",
                "none",
                (
                    (f"sum({PREFIX}verify_failures_total{{@}})", "verify failures"),
                    (f"sum({PREFIX}checksum_mismatches_total{{@}})", "mismatches"),
                ),
            ),
        ),
    ),
    (
        "Loading, fsync, workers",
        (
            _durations("Load of a file", "file_load", "From open for reading to the last close."),
            _durations("fsync", "fsync", "With --fsync durable, until it is persisted."),
            Panel(
                "Workers so far",
                "none",
                ((_gauge("worker_number"), MEMBER),),
                "More than one after a death or a reload.",
            ),
            Panel(
                "Members",
                "none",
                (
                    (f"max({_gauge('live_nodes')})", "live"),
                    (f"max({_gauge('missing_nodes')})", "missing"),
                ),
            ),
        ),
    ),
)


def dashboard(title: str) -> dict[str, Any]:
    """As Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for heading, row in ROWS:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": heading,
                "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
                "panels": [],
            }
        )
        height = HEIGHT // 2 if row[0].is_stat else HEIGHT
        width = WIDTH // len(row)
        for number, panel in enumerate(row):
            place = {"x": number * width, "y": y + 1, "w": width, "h": height}
            panels.append(_panel(panel) | {"id": len(panels) + 1, "gridPos": place})
        y += 1 + height
    return {
        "title": title,
        "uid": "acpfs",
        "tags": ["acpfs"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [_source(), _choice("mount"), _choice("node")]},
        "panels": panels,
    }


def _panel(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.red_above is not None:
        steps.append({"color": "red", "value": panel.red_above})
    return {
        "type": "stat" if panel.is_stat else "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "thresholds": {"mode": "absolute", "steps": steps},
            },
            "overrides": [],
        },
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": SOURCE,
                "expr": expression.replace("@", WHERE),
                "legendFormat": legend,
            }
            for number, (expression, legend) in enumerate(panel.queries)
        ],
    }


def _source() -> dict[str, Any]:
    return {
        "name": "datasource",
        "type": "datasource",
        "query": "prometheus",
        "label": "Prometheus",
    }


def _choice(label: str) -> dict[str, Any]:
    return {
        "name": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": f"label_values({PREFIX}ram_budget_bytes, {label})", "refId": label},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    }


@click.command("dashboard")
@click.option("--title", default="acpfs", show_default=True, help="Title in Grafana.")
def command(title: str) -> None:
    """Print a dashboard for Grafana, to be imported or provisioned; it asks for the Prometheus that
    has the metrics.
    """
    click.echo(json.dumps(dashboard(title), indent=2))
