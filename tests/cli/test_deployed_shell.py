"""What the printed manifests and scripts have a shell do, carried out by one: in success, and in
each failure that whoever calls it must be told of.

`acpfs` and `acpfs-ctl` are doubles here; tests/deploy has them for real, in containers and below
Slurm, which CI cannot start.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from acpfs.cli.deploy import command
from tests.rig.mounts import AcpfsMount

LIMIT_S = 60
DOUBLE = """#!/bin/sh
echo "$(basename "$0") $*" >> "{told}"
{does}
"""


class Doubles:
    """Programs in a directory of their own, in front of the system's."""

    def __init__(self, top: Path) -> None:
        self.told = top / "told"
        self.told.touch()
        self.bin = top / "bin"
        self.bin.mkdir()

    def put(self, name: str, does: str) -> None:
        """What `name` does, once it has said how it was called."""
        path = self.bin / name
        path.write_text(DOUBLE.format(told=self.told, does=does))
        path.chmod(0o755)

    def environment(self, **more: str) -> dict[str, str]:
        return {"PATH": f"{self.bin}:/usr/sbin:/usr/bin:/sbin:/bin", **more}

    def calls(self) -> list[str]:
        """Who was called how, in order."""
        return self.told.read_text().splitlines()


@pytest.fixture
def doubles(tmp_path: Path) -> Doubles:
    return Doubles(tmp_path)


def containers(mountpoint: Path, *options: str) -> Iterator[dict[str, Any]]:
    """Of all that Kubernetes would start, by the manifests' order."""
    words = ["kubernetes", "/shared/ckpt", str(mountpoint), "--image", "acpfs:1", "--ram", "1G"]
    done = CliRunner().invoke(command, [*words, *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    for document in yaml.safe_load_all(done.stdout):
        template = document.get("spec", {}).get("template", {}).get("spec", {})
        yield from template.get("initContainers", [])
        yield from template.get("containers", [])


def words_of(container: dict[str, Any], **environment: str) -> list[str]:
    """Its command, with $(NAME) as the kubelet replaces it."""
    return [
        re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], word)
        for word in container["command"]
    ]


def one(mountpoint: Path, name: str, *options: str) -> dict[str, Any]:
    (found,) = (each for each in containers(mountpoint, *options) if each["name"] == name)
    return found


def run(words: list[str], environment: dict[str, str]) -> int:
    return subprocess.run(words, env=environment, timeout=LIMIT_S, check=False).returncode


# -- the daemon, and jobs beside it


@pytest.mark.parametrize("is_there", [False, True])
def test_the_daemon_mounts_whether_or_not_its_mount_point_is_there(
    tmp_path: Path, doubles: Doubles, is_there: bool
) -> None:
    """And what it ends with is what the kubelet sees."""
    mountpoint = tmp_path / "ckpt"
    if is_there:
        mountpoint.mkdir()
    (container,) = (
        each
        for each in containers(mountpoint)
        if "mount" in " ".join(each["command"]) and "--take-over" in " ".join(each["command"])
    )
    told = {"NODE_NAME": "n7", "POD_UID": "u-1", "POD_IP": "10.0.0.7"}
    doubles.put("acpfs", "exit 6")
    assert run(words_of(container, **told), doubles.environment()) == 6
    (called,) = doubles.calls()
    assert called.startswith(
        "acpfs mount --config /etc/acpfs/acpfs.toml --foreground --take-over --node-id=n7 "
    )
    assert {"--instance=u-1", "--metrics-address=10.0.0.7"} <= set(called.split())
    assert mountpoint.is_dir()


def test_a_job_waits_until_the_mount_is_ready(tmp_path: Path, doubles: Doubles) -> None:
    container = one(tmp_path / "ckpt", "wait-for-acpfs")
    doubles.put("acpfs-ctl", f"[ $(wc -l < '{doubles.told}') -ge 2 ]")
    assert run(words_of(container), doubles.environment()) == 0
    assert doubles.calls() == [f"acpfs-ctl {tmp_path}/ckpt ready"] * 2


@pytest.mark.parametrize("code", [0, 1])
def test_the_example_job_ends_well_only_if_it_is_stored(
    tmp_path: Path, doubles: Doubles, code: int
) -> None:
    mountpoint = tmp_path / "ckpt"
    container = one(mountpoint, "train")
    mountpoint.mkdir()
    doubles.put("dd", "")
    doubles.put("acpfs-ctl", f"exit {code}")
    assert run(words_of(container), doubles.environment()) == code
    assert doubles.calls()[-1] == f"acpfs-ctl {mountpoint} flush {mountpoint}/example"


# -- Slurm's TaskProlog: what it prints is carried out for each task


def task_prolog(top: Path, backing: Path, mountpoint: Path) -> list[str]:
    target = top / "slurm"
    words = ["slurm", str(backing), str(mountpoint), "--to", str(target)]
    done = CliRunner().invoke(command, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    prints = subprocess.run(
        ["sh", str(target / "task-prolog.sh")],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    assert prints.stderr == ""
    return prints.stdout.splitlines()


@pytest.mark.mount
@pytest.mark.transports("native")
def test_tasks_are_told_where_to_save_and_that_acpfs_is_there(tmp_path: Path) -> None:
    (tmp_path / "backing").mkdir()
    with AcpfsMount(tmp_path / "backing", tmp_path / "mnt", "native") as mount:
        assert task_prolog(tmp_path, mount.backing, mount.path) == [
            f"export ACPFS_DIR={mount.path}",
            "export ACPFS_SERVED=yes",
        ]
        # a dot is no other character
        other = Path(f"{mount.path}".replace("mnt", "m.t"))
        assert "export ACPFS_SERVED=no" in task_prolog(tmp_path / "other", mount.backing, other)


def test_tasks_are_told_where_acpfs_is_not_there(tmp_path: Path) -> None:
    """They go on, at the storage, and their users see it."""
    place, served, printed = task_prolog(tmp_path, tmp_path / "backing", tmp_path / "mnt")
    assert place == f"export ACPFS_DIR={tmp_path}/mnt"
    assert served == "export ACPFS_SERVED=no"
    assert printed.startswith(f"print acpfs does not serve {tmp_path}/mnt on ")
    assert printed.endswith(f": saves go straight to {tmp_path}/backing")
