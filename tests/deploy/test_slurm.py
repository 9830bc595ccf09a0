"""Slurm's scripts: what `acpfs deploy slurm` writes, and jobs of a real slurmctld and slurmd that
are cancelled, requeued, and go on.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from acpfs.cli import show
from tests.deploy.slurm_rig import Slurm, cluster, wait_for
from tests.rig.guide import GUIDE, blocks

BIN = Path(sys.executable).parent
MIB = 1 << 20
JOB = """#!/bin/bash
exec {python} {trainer} "$ACPFS_DIR/run" "{told}"
"""
TRAINER = """
import json, os, sys, time
from pathlib import Path
run, told = Path(sys.argv[1]), Path(sys.argv[2])
run.mkdir(exist_ok=True)
tracker = run / "latest"
step = int(tracker.read_text()) if tracker.exists() else 0
begins = bytes((run / f"step-{step}.bin").read_bytes()[:1]) if step else b""
with told.open("a") as out:
    said = {"resumed": step, "begins": list(begins), "served": os.environ["ACPFS_SERVED"]}
    print(json.dumps(said), file=out)
for step in range(step + 1, step + 4):
    (run / f"step-{step}.bin").write_bytes(bytes([step]) * (4 << 20))
    (run / "latest.new").write_text(str(step))
    os.replace(run / "latest.new", tracker)
with told.open("a") as out:
    print(json.dumps({"saved": step}), file=out)
if step < 6:
    time.sleep(600)
"""


def deploy(directory: Path, backing: Path, mountpoint: Path, *options: str) -> str:
    command = [
        str(BIN / "acpfs"),
        "deploy",
        "slurm",
        str(backing),
        str(mountpoint),
        "--to",
        str(directory),
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_scripts_are_written_once_and_parse(tmp_path: Path) -> None:
    said = deploy(
        tmp_path / "slurm",
        tmp_path / "backing",
        tmp_path / "mount",
        "--options",
        "--ram 8G --fsync durable",
        "--required",
    )
    assert f"Prolog={tmp_path}/slurm/prolog.sh\n" in said
    settings = (tmp_path / "slurm/acpfs.conf").read_text()
    assert "ACPFS_OPTIONS='--ram 8G --fsync durable'\n" in settings
    assert "ACPFS_REQUIRED=yes\n" in settings
    for script in ("prolog.sh", "epilog.sh", "task-prolog.sh", "acpfs.conf"):
        subprocess.run(["sh", "-n", str(tmp_path / "slurm" / script)], check=True, timeout=60)
    again = subprocess.run(
        [str(BIN / "acpfs"), "deploy", "slurm", "/a", "/b", "--to", str(tmp_path / "slurm")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (again.returncode, "exists already" in again.stderr) == (5, True)
    assert (tmp_path / "slurm/acpfs.conf").read_text() == settings


@pytest.mark.parametrize("path", ["relative/path", "/with space", "/quo'te", "/$(id)"])
def test_a_path_that_a_shell_would_change_is_refused(tmp_path: Path, path: str) -> None:
    command = [
        str(BIN / "acpfs"),
        "deploy",
        "slurm",
        path,
        "/mnt/acp",
        "--to",
        str(tmp_path / "slurm"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, (tmp_path / "slurm").exists()) == (2, False)


DOUBLE = """#!/bin/sh
echo "$(basename "$0") $*" >> "{told}"
{does}
"""


class Prolog:
    """The script with doubles of what it calls; those of the system are in its PATH behind them."""

    def __init__(self, top: Path, *options: str) -> None:
        self.top = top
        self.told = top / "told"
        (top / "bin").mkdir()
        deploy(top / "scripts", top / "backing", top / "mount", *options)
        conf = top / "scripts/acpfs.conf"
        lines = [
            line
            for line in conf.read_text().splitlines()
            if not line.startswith(("ACPFS_PATH=", "ACPFS_LOCK="))
        ]
        conf.write_text(
            "\n".join([*lines, f"ACPFS_PATH='{top}/bin'", f"ACPFS_LOCK='{top}/lock'"]) + "\n"
        )
        for name, does in {
            "logger": "",
            "mkdir": "exit 1",
            "mountpoint": "exit 1",
            "mount": "",
            "umount": "",
        }.items():
            self.double(name, does)

    def double(self, name: str, does: str) -> None:
        path = self.top / "bin" / name
        path.write_text(DOUBLE.format(told=self.told, does=does))
        path.chmod(0o755)

    def says(self, status: dict[str, str], *, after_mount: dict[str, str] | None = None) -> None:
        """What `acpfs-ctl status --json` prints, in the command's own form; before and after `acpfs
        mount`.
        """
        for name, one in (("before", status), ("after", after_mount or status)):
            (self.top / name).write_text(json.dumps(one, indent=2))
        self.double(
            "acpfs-ctl",
            f"cat '{self.top}'/$([ -e '{self.top}/mounted' ] && echo after || echo before)",
        )

    def run(self, script: str = "prolog.sh") -> tuple[int, list[str]]:
        """Its exit code, and who was called how."""
        done = subprocess.run(
            ["sh", str(self.top / "scripts" / script)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return done.returncode, self.told.read_text().splitlines()


def test_the_prolog_knows_what_the_status_of_a_held_mount_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show.print_json({"state": "held", "mount": "/mnt/acp"})
    assert '"state": "held"' in capsys.readouterr().out


def test_a_prolog_mounts_what_only_a_keeper_holds_though_the_mount_point_answers_nobody(
    tmp_path: Path,
) -> None:
    prolog = Prolog(tmp_path, "--options", "--ram 1G")
    prolog.says({"state": "held"})
    prolog.double("acpfs", "")
    code, called = prolog.run()
    assert code == 0
    assert f"acpfs mount --ram 1G {tmp_path}/backing {tmp_path}/mount" in called
    assert not any(one.startswith(("mount ", "umount ")) for one in called), called


def test_a_prolog_leaves_a_mount_that_serves_alone(tmp_path: Path) -> None:
    prolog = Prolog(tmp_path)
    prolog.says({"state": "serving"})
    prolog.double("acpfs", "exit 1")
    assert prolog.run() == (0, [f"acpfs-ctl {tmp_path}/mount status --json"])


@pytest.mark.parametrize(("required", "code"), [(False, 0), (True, 1)])
def test_a_held_mount_that_nobody_can_serve_is_not_taken_for_one_that_serves(
    tmp_path: Path, required: bool, code: int
) -> None:
    prolog = Prolog(tmp_path, *(["--required"] if required else []))
    prolog.says({"state": "held"})
    prolog.double("acpfs", "echo no >&2; exit 6")
    found, called = prolog.run()
    assert found == code
    assert (f"mount --bind {tmp_path}/backing {tmp_path}/mount" in called) == (not required)


def test_another_prolog_may_have_mounted_meanwhile(tmp_path: Path) -> None:
    prolog = Prolog(tmp_path, "--required")
    prolog.says({"state": "held"}, after_mount={"state": "serving"})
    prolog.double("acpfs", f"touch '{tmp_path}/mounted'; exit 5")
    assert prolog.run()[0] == 0


@pytest.mark.parametrize(
    ("flush", "is_told"),
    [("exit 0", False), ("echo 3 files are left; exit 1", True), ("kill -9 $$", True)],
)
def test_an_epilog_never_fails(tmp_path: Path, flush: str, *, is_told: bool) -> None:
    """Slurm drains a node whose epilog does."""
    script = Prolog(tmp_path)
    script.double("acpfs-ctl", flush)
    code, told = script.run("epilog.sh")
    assert code == 0
    assert told[0].startswith("acpfs-ctl ")
    said = [line for line in told if line.startswith("logger")]
    assert len(said) == is_told
    assert all("not persisted, and going on" in line for line in said)


@pytest.mark.parametrize("conf", ["", "ACPFS_PATH=/\n", None])
def test_nor_does_one_without_its_settings(tmp_path: Path, conf: str | None) -> None:
    script = Prolog(tmp_path)
    path = tmp_path / "scripts/acpfs.conf"
    if conf is None:
        path.unlink()
    else:
        path.write_text(conf)
    script.told.touch()
    assert script.run("epilog.sh") == (0, [])


class Site:
    """One node with Slurm, our scripts and a place to save."""

    def __init__(self, top: Path, *options: str, backing: str = "backing") -> None:
        self.top = top
        self.mountpoint = top / "mount"
        self.backing = top / backing
        (top / "backing").mkdir()
        (top / "cluster").mkdir()
        self.parameters = deploy(top / "scripts", self.backing, self.mountpoint, *options)
        conf = top / "scripts/acpfs.conf"
        conf.write_text(conf.read_text().replace("/run/acpfs-prolog.lock", str(top / "lock")))
        (top / "trainer.py").write_text(TRAINER)
        self.told = top / "told"
        (top / "job.sh").write_text(
            JOB.format(python=sys.executable, trainer=top / "trainer.py", told=self.told)
        )

    def lines(self) -> list[dict[str, object]]:
        return (
            [json.loads(line) for line in self.told.read_text().splitlines()]
            if self.told.exists()
            else []
        )

    def ctl(self, *words: str) -> str:
        done = subprocess.run(
            [str(BIN / "acpfs-ctl"), str(self.mountpoint), *words],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def end(self) -> None:
        subprocess.run(
            [str(BIN / "acpfs"), "umount", str(self.mountpoint), "--timeout", "60"],
            capture_output=True,
            timeout=120,
            check=False,
        )
        while (
            f" {self.mountpoint} " in Path("/proc/self/mountinfo").read_text()
        ):  # ismount does not see a bind mount
            subprocess.run(["umount", "-l", str(self.mountpoint)], check=True, timeout=60)


@pytest.fixture
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Site, Slurm]]:
    site = Site(tmp_path, *getattr(request, "param", ("--options", "--ram 256M")))
    try:
        with cluster(tmp_path / "cluster", site.parameters) as slurm:
            yield site, slurm
    finally:
        site.end()


@pytest.mark.long  # real servers
@pytest.mark.mount
@pytest.mark.timeout(400)
def test_a_job_that_is_requeued_resumes_from_ram(site: tuple[Site, Slurm]) -> None:
    here, slurm = site
    job = slurm.submit(here.top / "job.sh", here.top / "out")
    wait_for("three steps", lambda: {"saved": 3} in here.lines(), 120)
    slurm.run("scontrol", "requeue", job)
    wait_for("the second run", lambda: {"saved": 6} in here.lines(), 240)
    slurm.wait_for_state(job, "COMPLETED")
    resumed = [line for line in here.lines() if "resumed" in line]
    assert resumed == [
        {"resumed": 0, "begins": [], "served": "yes"},
        {"resumed": 3, "begins": [3], "served": "yes"},
    ]
    files = {entry["path"]: entry for entry in json.loads(here.ctl("ls", "--json"))}
    assert files["run/step-3.bin"]["tier"] in {"ram", "ram+backing"}, files["run/step-3.bin"]
    wait_for("the epilog's flush", lambda: (here.backing / "run/step-6.bin").exists())
    assert (here.backing / "run/step-6.bin").read_bytes() == bytes([6]) * 4 * MIB
    assert (here.backing / "run/latest").read_text() == "6"


@pytest.mark.long
@pytest.mark.mount
@pytest.mark.timeout(400)
def test_a_job_that_is_cancelled_is_stored_by_the_mount_that_stays(
    site: tuple[Site, Slurm],
) -> None:
    here, slurm = site
    job = slurm.submit(here.top / "job.sh", here.top / "out")
    wait_for("three steps", lambda: {"saved": 3} in here.lines(), 120)
    slurm.run("scancel", job)
    slurm.wait_for_state(job, "CANCELLED")
    wait_for(
        "all on the storage",
        lambda: (
            (here.backing / "run/latest").exists()
            and (here.backing / "run/latest").read_text() == "3"
        ),
    )
    assert os.path.ismount(here.mountpoint)


@pytest.mark.long
@pytest.mark.mount
@pytest.mark.timeout(400)
@pytest.mark.parametrize("site", [("--options", "--no-such-option")], indirect=True)
def test_without_acpfs_a_job_saves_straight_to_the_storage(site: tuple[Site, Slurm]) -> None:
    here, slurm = site
    slurm.submit(here.top / "job.sh", here.top / "out")
    wait_for("three steps", lambda: {"saved": 3} in here.lines(), 120)
    assert here.lines()[0]["served"] == "no"
    assert (here.backing / "run/latest").read_text() == "3"
    assert "saves go straight to" in (here.top / "out").read_text()


@pytest.mark.long
@pytest.mark.mount
@pytest.mark.timeout(400)
@pytest.mark.parametrize("site", [("--options", "--no-such-option", "--required")], indirect=True)
def test_where_acpfs_is_required_the_job_waits_and_the_node_is_drained(
    site: tuple[Site, Slurm],
) -> None:
    here, slurm = site
    job = slurm.submit(here.top / "job.sh", here.top / "out")
    wait_for("a drained node", lambda: "drain" in slurm.node_state(), 120)
    assert slurm.state(job) != "COMPLETED"
    assert here.lines() == []


IN_THE_GUIDE = {
    "--nodes 4": "--nodes 1",
    "ssh gpu-17 /opt/acpfs/bin/acpfs": f"{BIN}/acpfs",
    "/opt/acpfs/bin": str(BIN),
    "srun python": f"srun {sys.executable}",
    "nodename=gpu-17": f"nodename={socket.gethostname().split('.')[0]}",
}
"""What is a cluster of several nodes there, and of one here."""
SAVES = """
import sys
from pathlib import Path
run = Path(sys.argv[sys.argv.index("--save-dir") + 1])
run.mkdir()
(run / "model.pt").write_bytes(b"1" * (32 << 20))
"""


@pytest.mark.long
@pytest.mark.mount
@pytest.mark.timeout(400)
def test_what_the_guide_has_people_type(site: tuple[Site, Slurm]) -> None:
    """Block after block, each as it stands there but for names and numbers of nodes."""
    here, slurm = site
    slurm.environment["PATH"] = "/usr/sbin:/usr/bin:/sbin:/bin"  # a user's, without acpfs
    needs_slurm = [one.text for one in blocks(GUIDE / "slurm.md") if "Slurm" in (one.why or "")]
    for there, on_this_one in {**IN_THE_GUIDE, "/mnt/acp": str(here.mountpoint)}.items():
        needs_slurm = [text.replace(there, on_this_one) for text in needs_slurm]
    check, job, leave = needs_slurm
    assert f"{here.mountpoint} yes\n" in slurm.run("bash", "-euc", check)
    (here.top / "cluster" / "train.py").write_text(SAVES)
    (here.top / "guide.sh").write_text(job)
    number = slurm.submit(here.top / "guide.sh", here.top / "guide.out")
    slurm.wait_for_state(number, "COMPLETED")
    told = (here.top / "guide.out").read_text()
    assert f"persisted: {here.mountpoint}/run1" in told
    assert (here.backing / "run1" / "model.pt").stat().st_size == 32 * MIB
    slurm.run("bash", "-euc", leave)
    assert not os.path.ismount(here.mountpoint)
    assert "drain" in slurm.node_state()
