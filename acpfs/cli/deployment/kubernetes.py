"""`acpfs deploy kubernetes`: manifests made of the settings of a mount, which are checked as `acpfs
mount` checks them.
"""

from __future__ import annotations

import json
import math
import posixpath
import re
from pathlib import Path
from typing import Any

import attrs
import click

from acpfs import __version__
from acpfs.cli.deployment.templates import filled, indented, scalar, toml
from acpfs.cli.file_names import FILE_PATH
from acpfs.cli.mount import ARGUMENTS, DescribedCommand, setting_options
from acpfs.config import OFF, Settings, load_settings
from acpfs.errors import ConfigError

DAEMON_BYTES = 1 << 30
"""Beside the RAM tier: what worker, template and supervisor take, and the page cache of what they
read; half of it is usual.
"""
UNMOUNT_S = 60
"""After the drain: until the last file is closed and the mount is gone."""
METRICS_PORT = 9311
FLUSH_SHARE = 0.5
"""Of a job's grace period for `preStop`; the rest is the training's own."""
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?")
OF_THE_POD = {
    "node_id": "is the name of the Kubernetes node",
    "runtime_dir": "is /run/acpfs of the node",
    "log_file": "is the container's output",
    "metrics_address": "is the address of the pod",
    "metrics_port": "has an option of its own here, for the pod's port as well",
}
"""Settings that the manifests decide."""


@attrs.frozen(kw_only=True)
class KubernetesCluster:
    """What the manifests must know beside the settings of the mount."""

    name: str
    namespace: str
    image: str
    claim: str
    nodes: dict[str, str]
    nodes_at_once: str
    priority_class: str
    metrics_port: int
    cpu: str
    fuse_resource: str


def check(settings: Settings) -> None:
    """What is right on a machine and wrong in a pod.

    Raises:
        ConfigError: naming the setting.
    """
    complaints = [
        f"{name} {why}: leave it out"
        for name, why in OF_THE_POD.items()
        if name in settings.given and name != "metrics_port"
    ]
    if not isinstance(settings.ram, int):
        complaints.append(
            "ram must be a size such as 64G here: the scheduler must know it, and a share would "
            "be one of the container's limit"
        )
    for name in ARGUMENTS:
        path = str(getattr(settings, name))
        if not posixpath.isabs(path) or posixpath.normpath(path) != path:
            complaints.append(f"{name} = {path!r}: must be an absolute path without `.` and `..`")
    if posixpath.dirname(str(settings.mountpoint)) == "/":
        complaints.append(
            f"mountpoint = {str(settings.mountpoint)!r}: the directory above it is handed to the "
            "pods, and cannot be /"
        )
    if complaints:
        raise ConfigError("; ".join(complaints))


def values_of(settings: Settings, cluster: KubernetesCluster) -> dict[str, Any]:
    """What the templates want to know, as YAML has it."""
    assert isinstance(settings.ram, int)
    drain_s = math.ceil(settings.drain_timeout_s)
    grace_s = drain_s + UNMOUNT_S
    given = {
        name: value
        for name, value in settings.as_json(given_only=True).items()
        if name != "metrics_port"
    }
    backing = str(settings.backing)
    if cluster.claim:
        volume = f"persistentVolumeClaim: {{claimName: {scalar(cluster.claim)}}}"
        propagation = ""
    else:
        # as the node has it, also when its file system is mounted anew
        volume = f"hostPath: {{path: {scalar(backing)}, type: Directory}}"
        propagation = ", mountPropagation: HostToContainer"
    return {
        "version": __version__,
        "name": scalar(cluster.name),
        "namespace": scalar(cluster.namespace),
        "image": scalar(cluster.image),
        "settings": indented(toml(given), 4),
        "backing": scalar(backing),
        "backing_volume": volume,
        "backing_propagation": propagation,
        "mountpoint": scalar(str(settings.mountpoint)),
        "mounts": scalar(posixpath.dirname(str(settings.mountpoint))),
        "node_selector": json.dumps(cluster.nodes),
        "nodes_at_once": int(cluster.nodes_at_once)
        if cluster.nodes_at_once.isdigit()
        else scalar(cluster.nodes_at_once),
        "priority_class": scalar(cluster.priority_class),
        "metrics_port": cluster.metrics_port,
        "cpu": json.dumps(cluster.cpu),
        "memory": json.dumps(f"{math.ceil((settings.ram + DAEMON_BYTES) / (1 << 20))}Mi"),
        "drain_s": drain_s,
        "keeper_wait_s": math.ceil(settings.keeper_wait_s),
        "grace_s": grace_s,
        "job_grace_s": math.ceil(grace_s / FLUSH_SHARE),
        "flush_s": grace_s,
        "fuse_resource": scalar(cluster.fuse_resource),
    }


def manifests(
    settings: Settings, cluster: KubernetesCluster, *, inside: bool, monitor: bool, example: bool
) -> str:
    """The text of them all."""
    values = values_of(settings, cluster)
    if inside:
        return filled("inside.yaml", values)
    parts = [
        "kubernetes.yaml",
        *(["policy.yaml"] if settings.listens != OFF else []),
        *(["monitor.yaml"] if monitor else []),
        *(["job.yaml"] if example else []),
    ]
    return "".join(filled(part, values) for part in parts)


def _selector(
    _context: click.Context, _option: click.Parameter, given: tuple[str, ...]
) -> dict[str, str]:
    labels = dict(text.partition("=")[::2] for text in given)
    if any("=" not in text for text in given):
        raise click.BadParameter("write LABEL=VALUE")
    return labels


def _name(_context: click.Context, _option: click.Parameter, given: str) -> str:
    if _NAME.fullmatch(given) is None:
        raise click.BadParameter(
            "small letters, digits and dashes, at most 42, the first one a letter"
        )
    return given


def _share(_context: click.Context, _option: click.Parameter, given: str) -> str:
    if re.fullmatch(r"[1-9][0-9]{0,5}|[1-9][0-9]?%|100%", given) is None:
        raise click.BadParameter("a number of nodes, or a share such as 10%")
    return given


@click.command(
    "kubernetes",
    cls=DescribedCommand,
    params=[
        click.Argument(["backing"], required=False, type=FILE_PATH),
        click.Argument(["mountpoint"], required=False, type=str),
        click.Option(
            ["--image"],
            required=True,
            metavar="IMAGE",
            help=("Container image with acpfs (see `acpfs deploy containerfile`)."),
        ),
        click.Option(
            ["--claim"],
            default="",
            metavar="NAME",
            help="The PersistentVolumeClaim "
            "(ReadWriteMany) with the "
            "checkpoints, "
            "in the same namespace; without it BACKING is a directory of the node.",
        ),
        click.Option(
            ["--config"],
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Read settings from this TOML file.",
        ),
        click.Option(
            ["--name"],
            default="acpfs",
            show_default=True,
            callback=_name,
            help="Name of all objects.",
        ),
        click.Option(["--namespace"], default="acpfs", show_default=True, callback=_name),
        click.Option(
            ["--node", "nodes"],
            multiple=True,
            callback=_selector,
            metavar="LABEL=VALUE",
            help="Use only nodes with this label.",
        ),
        click.Option(
            ["--nodes-at-once"],
            default="10%",
            show_default=True,
            callback=_share,
            help="Nodes to change at a time.",
        ),
        click.Option(["--priority-class"], default="system-node-critical", show_default=True),
        click.Option(
            ["--cpu"], default="2", show_default=True, help="CPU request; there is no limit."
        ),
        click.Option(
            ["--inside"],
            is_flag=True,
            help=("Mount in the job's own container, for clusters that forbid Bidirectional."),
        ),
        click.Option(
            ["--fuse-resource"],
            default="devices.example/fuse",
            show_default=True,
            help="With --inside: what the device plug-in for /dev/fuse calls it.",
        ),
        click.Option(
            ["--monitor/--no-monitor"],
            default=True,
            show_default=True,
            help=("Add a PodMonitor for the Prometheus operator."),
        ),
        click.Option(
            ["--example/--no-example"],
            default=True,
            show_default=True,
            help="Add an example of a job.",
        ),
        *setting_options(),
    ],
)
def command(
    config: Path | None, inside: bool, monitor: bool, example: bool, **options: Any
) -> None:
    """Print manifests for acpfs with BACKING at MOUNTPOINT on each node, and an example of a job
    that uses it.

    Settings are those of `acpfs mount`, as options or from a file, and go into a ConfigMap.
    MOUNTPOINT is a path of the node and of the pods; the directory above it is handed to them.
    `ram` must be a size.
    """
    known = {field.name for field in attrs.fields(KubernetesCluster)} - {"metrics_port"}
    words = {name: value for name, value in options.items() if name in known}
    given = {
        name: value for name, value in options.items() if name not in known and value is not None
    }
    settings = load_settings(given, config)
    check(settings)
    cluster = KubernetesCluster(**words, metrics_port=settings.metrics_port or METRICS_PORT)
    click.echo(
        manifests(settings, cluster, inside=inside, monitor=monitor, example=example), nl=False
    )
