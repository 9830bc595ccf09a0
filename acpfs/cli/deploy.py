"""`acpfs deploy`: what a cluster needs to run acpfs, printed or written; nothing is applied, built
or sent.
"""

from __future__ import annotations

import click

from acpfs.cli.lazy import LazyGroup

COMMANDS = {
    "kubernetes": (
        "acpfs.cli.deployment.kubernetes",
        "Manifests: a daemon on each node, and an example of a job.",
    ),
    "containerfile": (
        "acpfs.cli.deployment.containerfile",
        "How to build the image that the manifests name.",
    ),
    "dashboard": ("acpfs.cli.deployment.dashboard", "A dashboard for Grafana."),
    "alerts": ("acpfs.cli.deployment.alerts", "Alert rules for Prometheus."),
    "slurm": ("acpfs.cli.deployment.slurm", "Write Slurm's Prolog, Epilog and TaskProlog."),
}


@click.group("deploy", cls=LazyGroup, lazy=COMMANDS)
def command() -> None:
    """Print or write what a cluster needs to run acpfs. Nothing is applied or built."""
