"""A cluster of one node: munged, slurmctld and slurmd, as Debian has them, with directories, keys
and ports of their own.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.rig.ports import free_port
from tests.rig.storage.servers import until

WAIT_S = 60.0
CONFIGURATION = """
ClusterName=acpfs
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={top}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={top}/state
SlurmdSpoolDir={spool}
SlurmctldPidFile={top}/slurmctld.pid
SlurmdPidFile={top}/slurmd.pid
SlurmctldLogFile={top}/slurmctld.log
SlurmdLogFile={top}/slurmd.log
SlurmdParameters=config_overrides
SelectType=select/cons_tres
ReturnToService=2
JobRequeue=1
KillWait=5
{parameters}
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=train Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def wait_for(what: str, condition: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    until(lambda: bool(condition()), what, timeout_s)


class Slurm:
    """The running cluster; `run` carries out one of Slurm's commands."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.environment = {"SLURM_CONF": str(top / "slurm.conf"), "PATH": os.environ["PATH"]}

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command,
            env=self.environment,
            cwd=self.top,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, script: Path, output: Path) -> str:
        """The job's number."""
        return self.run(
            "sbatch",
            "--parsable",
            "--requeue",
            f"--output={output}",
            "--open-mode=append",
            str(script),
        )

    def state(self, job: str) -> str:
        """What Slurm says of a job: PENDING, RUNNING, COMPLETED …; why a job waits may follow."""
        words = dict(
            word.split("=", 1)
            for word in self.run("scontrol", "show", "job", job).split()
            if "=" in word
        )
        return words["JobState"]

    def node_state(self) -> str:
        return self.run("sinfo", "--noheader", "--format=%T")

    def wait_for_state(self, job: str, state: str) -> None:
        seen: list[str] = []

        def reached() -> bool:
            seen.append(self.state(job))
            return seen[-1] == state

        try:
            wait_for(f"job {job} {state}", reached)
        except TimeoutError as error:
            logs = "\n".join(
                path.read_text(errors="replace")[-2000:] for path in sorted(self.top.glob("*.log"))
            )
            raise AssertionError(
                f"{error}; it is {seen[-1]}, the node {self.node_state()}\n{logs}"
            ) from None


@contextlib.contextmanager
def cluster(top: Path, parameters: str) -> Iterator[Slurm]:
    """Start all three; end them by their process ids, also when the test failed."""
    top.chmod(0o755)
    (top / "state").mkdir()
    spool = tempfile.mkdtemp(
        prefix="slurmd-", dir="/tmp"
    )  # sockets lie there, whose paths may be long with pytest's directories
    key = top / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    text = CONFIGURATION.format(
        host=socket.gethostname().split(".")[0],
        top=top,
        spool=spool,
        parameters=parameters,
        controller_port=free_port(),
        node_port=free_port(),
    )
    (top / "slurm.conf").write_text(text)
    slurm = Slurm(top)
    munged = shutil.which("munged") or "/usr/sbin/munged"
    commands = (
        [
            munged,
            "--foreground",
            "--force",
            f"--socket={top}/munge.socket",
            f"--key-file={key}",
            f"--pid-file={top}/munge.pid",
            f"--log-file={top}/munge.log",
            f"--seed-file={top}/munge.seed",
        ],
        [
            shutil.which("slurmctld") or "/usr/sbin/slurmctld",
            "-D",
            "-i",
            "-c",
            "-f",
            str(top / "slurm.conf"),
        ],
        [shutil.which("slurmd") or "/usr/sbin/slurmd", "-D", "-f", str(top / "slurm.conf")],
    )
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            with (top / f"{Path(command[0]).name}.out.log").open("wb") as out:
                started.append(
                    subprocess.Popen(
                        command,
                        env=slurm.environment,
                        cwd=top,
                        stdout=out,
                        stderr=out,
                        stdin=subprocess.DEVNULL,
                    )
                )
            if command[0] == munged:
                wait_for("munged", (top / "munge.socket").exists)
        wait_for("an idle node", lambda: "idle" in _said(slurm))
        yield slurm
    finally:
        if len(started) == len(commands):
            _cancel_all(slurm)
        for process in reversed(started):
            process.terminate()
        for process in reversed(started):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(spool, ignore_errors=True)


def _cancel_all(slurm: Slurm) -> None:
    """A step outlives slurmd, so jobs that still run are ended before it."""
    with contextlib.suppress(AssertionError, subprocess.TimeoutExpired, TimeoutError):
        slurm.run("scancel", "--me")
        wait_for("all jobs have ended", lambda: not slurm.run("squeue", "--noheader"))


def _said(slurm: Slurm) -> str:
    done = subprocess.run(
        ["sinfo", "--noheader", "--format=%T"],
        env=slurm.environment,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    return done.stdout
