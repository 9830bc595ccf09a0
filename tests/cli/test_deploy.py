"""`acpfs deploy`: what it prints is what Kubernetes takes, and says the same as the settings;
nothing in it is asked for twice.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner, Result

from acpfs.cli.deploy import command
from acpfs.cli.deployment.templates import scalar, toml
from acpfs.cli.mount import command as mount
from acpfs.config import Settings, load_settings

VERSIONS = ("1.25", "1.30", "1.34")
WORDS = [
    "/shared/ckpt",
    "/mnt/acpfs/ckpt",
    "--image",
    "registry.example:5000/acpfs:1",
    "--ram",
    "64G",
]
MONITORS = {"PodMonitor"}
"""Kinds that are not Kubernetes' own."""


def deploy(*words: str) -> Result:
    return CliRunner().invoke(command, list(words), catch_exceptions=True)


def printed(*words: str) -> list[dict[str, Any]]:
    done = deploy("kubernetes", *WORDS, *words)
    assert done.exit_code == 0, done.output
    return list(yaml.safe_load_all(done.stdout))


def of_kind(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The daemon's, where the keeper has one of the kind as well."""
    (found,) = [
        document
        for document in documents
        if document["kind"] == kind and not document["metadata"]["name"].endswith("-keeper")
    ]
    return found


def daemon(documents: list[dict[str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any] = of_kind(documents, "DaemonSet")["spec"]["template"]["spec"]
    return spec


def settings_in(documents: list[dict[str, Any]], tmp_path: Path) -> Settings:
    file = tmp_path / "acpfs.toml"
    file.write_text(of_kind(documents, "ConfigMap")["data"]["acpfs.toml"])
    return load_settings({}, file)


@pytest.mark.parametrize(
    "words",
    [[], ["--claim", "checkpoints", "--node", "gpu=yes"], ["--inside"], ["--copies", "1"]],
    ids=["host", "claim", "inside", "copies"],
)
def test_kubernetes_takes_the_manifests(words: list[str]) -> None:
    for document in printed(*words):
        if document["kind"] not in MONITORS:
            for version in VERSIONS:
                kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.clause("S604")
@pytest.mark.parametrize("words", [["--copies", "1"], ["--exchange", "auto"]])
def test_members_that_exchange_reach_each_other_and_prometheus_the_metrics(
    words: list[str],
) -> None:
    """A policy that selects a pod shuts out whatever none names."""
    documents = printed(*words)
    policy = of_kind(documents, "NetworkPolicy")["spec"]
    template = of_kind(documents, "DaemonSet")["spec"]["template"]
    labels = policy["podSelector"]["matchLabels"]
    assert labels.items() <= template["metadata"]["labels"].items()
    members, metrics = policy["ingress"]
    assert members["from"] == [{"podSelector": {"matchLabels": labels}}]
    assert members["ports"] == [{"protocol": "TCP", "port": 1024, "endPort": 65535}]
    (port,) = metrics["ports"]
    served = [one for each in template["spec"]["containers"] for one in each.get("ports", [])]
    assert port["port"] in {one["name"] for one in served}
    assert "from" not in metrics
    assert "NetworkPolicy" not in {document["kind"] for document in printed()}


def names(documents: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for document in documents:
        yield document["kind"], document["metadata"]["name"]


def test_all_parts_are_there_once_and_select_the_same_pods() -> None:
    documents = printed()
    assert sorted(kind for kind, _name in names(documents)) == sorted(
        [
            "Namespace",
            "ServiceAccount",
            "ConfigMap",
            "PodDisruptionBudget",
            "DaemonSet",
            "DaemonSet",
            "PodMonitor",
            "Job",
        ]
    )
    labels = of_kind(documents, "DaemonSet")["spec"]["template"]["metadata"]["labels"]
    for kind in ("DaemonSet", "PodDisruptionBudget", "PodMonitor"):
        assert of_kind(documents, kind)["spec"]["selector"]["matchLabels"] == labels
    (port,) = daemon(documents)["containers"][0]["ports"]
    assert (
        port["name"] == of_kind(documents, "PodMonitor")["spec"]["podMetricsEndpoints"][0]["port"]
    )
    assert {kind for kind, _name in names(printed("--no-monitor", "--no-example"))}.isdisjoint(
        {"PodMonitor", "Job"}
    )


def test_the_keeper_outlives_the_daemons_pod_and_sees_what_it_sees() -> None:
    """A pod of its own that no roll-out touches; not selected with the daemon's; evicted last; the
    same directories.
    """
    documents = printed("--claim", "checkpoints")
    (keeper,) = [
        document for document in documents if document["metadata"]["name"] == "acpfs-keeper"
    ]
    template = keeper["spec"]["template"]
    labels = of_kind(documents, "DaemonSet")["spec"]["selector"]["matchLabels"]
    assert keeper["spec"]["updateStrategy"] == {"type": "OnDelete"}
    assert not labels.items() <= template["metadata"]["labels"].items()
    (container,) = template["spec"]["containers"]
    (served,) = daemon(documents)["containers"]
    assert container["resources"]["limits"] == container["resources"]["requests"]
    assert [one for one in container["volumeMounts"] if one not in served["volumeMounts"]] == []
    assert template["spec"]["nodeSelector"] == daemon(documents)["nodeSelector"]
    assert "--instance=$(POD_UID)" in served["command"]


def test_settings_go_through_unchanged_and_the_times_follow_them(tmp_path: Path) -> None:
    documents = printed(
        "--drain-timeout",
        "1234.5",
        "--pointer-patterns",
        'latest:odd "name"',
        "--metrics-port",
        "9400",
    )
    settings = settings_in(documents, tmp_path)
    assert (settings.ram, settings.drain_timeout_s) == (64 << 30, 1234.5)
    assert settings.pointer_patterns == ("latest", 'odd "name"')
    spec = daemon(documents)
    assert spec["terminationGracePeriodSeconds"] > settings.drain_timeout_s
    container = spec["containers"][0]
    assert "--metrics-port=9400" in container["command"]
    assert container["ports"][0]["containerPort"] == 9400
    assert container["resources"]["limits"]["memory"] == f"{(65 << 30) >> 20}Mi"


def test_every_option_of_the_command_lines_is_one_of_acpfs_mount() -> None:
    options = {word for option in mount.params for word in option.opts}
    container = daemon(printed())["containers"][0]
    used = re.findall(r"(--[a-z-]+)", " ".join(container["command"]))
    assert used
    assert set(used) <= options


@pytest.mark.parametrize("kind", ["DaemonSet", "Job"])
def test_pods_have_the_directory_above_the_mount_point(kind: str) -> None:
    """The mount point itself would be the bare directory to a pod that was there before the
    mount.
    """
    spec = of_kind(printed(), kind)["spec"]["template"]["spec"]
    paths = {
        volume["name"]: volume["hostPath"]["path"]
        for volume in spec["volumes"]
        if "hostPath" in volume
    }
    assert "/mnt/acpfs" in paths.values()
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        for mounted in container["volumeMounts"]:
            if paths.get(mounted["name"]) in ("/mnt/acpfs", "/run/acpfs"):
                wanted = "Bidirectional" if kind == "DaemonSet" else "HostToContainer"
                assert (mounted["mountPath"], mounted["mountPropagation"]) == (
                    paths[mounted["name"]],
                    wanted,
                )


def shells(document: dict[str, Any]) -> Iterator[str]:
    spec = document["spec"]["template"]["spec"]
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        words = container.get("command", [])
        if words[:1] == ["sh"]:
            yield words[2]


def test_what_shells_run_is_a_program() -> None:
    for document in [*printed(), *printed("--inside")]:
        if document["kind"] in ("DaemonSet", "Job"):
            for text in shells(document):
                subprocess.run(["sh", "-n", "-c", text], check=True, timeout=60)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--ram", "25%"], "ram must be a size"),
        (["--node-id", "n"], "node_id is the name of the Kubernetes node"),
        (["--runtime-dir", "/run/x"], "runtime_dir is /run/acpfs"),
        (["--fsync", "never"], "fsync"),
        (["--name", "Big_Name"], "small letters"),
        (["--nodes-at-once", "0"], "a number of nodes"),
        (["--node", "gpu"], "LABEL=VALUE"),
    ],
)
def test_what_is_wrong_is_named(words: list[str], complaint: str) -> None:
    done = deploy("kubernetes", *WORDS, *words)
    assert done.exit_code != 0
    assert complaint in done.output + str(done.exception)


@pytest.mark.parametrize("mountpoint", ["/mnt", "mnt/acp", "/mnt/../acp"])
def test_a_mount_point_that_cannot_be_handed_on_is_refused(mountpoint: str) -> None:
    done = deploy("kubernetes", "/shared/ckpt", mountpoint, "--image", "i", "--ram", "1G")
    assert "mountpoint" in str(done.exception)


def test_values_are_quoted_where_yaml_would_take_them_for_something_else() -> None:
    texts = ["plain", "yes", "1.5", "a: b", "#", "", "/mnt/a b", "null", "-", "a#b", "10%", "x\ny"]
    assert [yaml.safe_load(f"key: {scalar(text)}")["key"] for text in texts] == texts


def test_settings_are_written_as_they_are_read(tmp_path: Path) -> None:
    given = {
        "backing": '/a"b\\c é',
        "mountpoint": "/m/n",
        "streams": 3,
        "stagger_s": 0.5,
        "verify_reads": True,
        "pointer_patterns": ["a", "b"],
    }
    file = tmp_path / "x.toml"
    file.write_text(toml(given), encoding="utf-8")
    assert load_settings({}, file).as_json(given_only=True) == given


def test_the_containerfile_copies_what_there_is() -> None:
    text = deploy("containerfile", "--base", "debian:12").stdout
    assert "ARG BASE=debian:12\n" in text
    root = Path(__file__).parents[2]
    copied = [
        word
        for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE)
        for word in line.split()
    ]
    assert copied
    assert all((root / word).exists() for word in copied)


def test_a_roll_out_puts_the_new_pod_beside_the_old_one_and_asks_whether_it_serves_itself() -> None:
    documents = printed("--nodes-at-once", "7")
    assert of_kind(documents, "DaemonSet")["spec"]["updateStrategy"]["rollingUpdate"] == {
        "maxUnavailable": 0,
        "maxSurge": 7,
    }
    container = daemon(documents)["containers"][0]
    assert "--take-over" in container["command"][2]
    for probe in ("startupProbe", "readinessProbe"):
        assert container[probe]["exec"]["command"] == [
            "acpfs-ctl",
            "/mnt/acpfs/ckpt",
            "ready",
            "--here",
        ]
    assert "livenessProbe" not in container
