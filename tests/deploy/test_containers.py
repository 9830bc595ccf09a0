"""Daemons and jobs in containers of a real image: kill, roll-out, drain, and who pays for memory.

An image by the printed Containerfile over Debian's packages, containers by crun, pods by the
printed manifests: `node_rig` does what a kubelet does. ACPFS_IMAGE_ROOT names the root file system
of an image that is there already; it is not changed.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from acpfs.ram.state import STATE_VERSION
from acpfs.supervisor import keeper_client
from tests.deploy import node_rig
from tests.deploy.node_rig import Container, Node, manifests, pod_of, wait_for
from tests.rig import history
from tests.rig.mounts import kinds_at

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(node_rig.missing()), reason=node_rig.missing() or "never"),
]
TURNS = int(os.environ.get("ACPFS_KILLS", "20"))
BACKING = "/shared/ckpt"
MOUNTPOINT = "/mnt/acpfs/ckpt"
OPTIONS = [
    BACKING,
    MOUNTPOINT,
    "--image",
    "acpfs:test",
    "--claim",
    "checkpoints",
    "--node",
    "gpu=yes",
    "--prefault",
    "0",
]
MIB = 1 << 20
JOB = """
import hashlib, json, os, sys, time
top, told = sys.argv[1], sys.argv[2]
os.makedirs(top + "/job", exist_ok=True)
log = open(top + "/job/log", "ab", buffering=0)
piece, sums, written, longest, step = os.urandom(1 << 20), {}, 0, 0.0, 0
while not os.path.exists(told + "/stop"):
    step += 1
    name, digest = f"step-{step % 8}.pt", hashlib.sha256()
    with open(f"{top}/job/{name}.new", "wb", buffering=0) as file:
        for number in range(16):
            begun = time.monotonic()
            block = number.to_bytes(8, "big") + step.to_bytes(8, "big") + piece[16:]
            assert file.write(block) == len(block)
            digest.update(block)
            written += log.write(b"x" * 100)
            longest = max(longest, time.monotonic() - begun)
            time.sleep(0.01)
    os.rename(f"{top}/job/{name}.new", f"{top}/job/{name}")
    sums[name] = digest.hexdigest()
    with open(told + "/told.new", "w") as out:
        json.dump({"steps": step, "written": written, "longest_s": longest, "sums": sums}, out)
    os.rename(told + "/told.new", told + "/told")
for name, digest in sums.items():
    with open(f"{top}/job/{name}", "rb") as file:
        assert hashlib.sha256(file.read()).hexdigest() == digest, name
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if there := os.environ.get("ACPFS_IMAGE_ROOT"):
        yield Path(there)
        return
    with node_rig.image(tmp_path_factory.mktemp("image")) as made:
        yield made


@pytest.fixture(scope="module", params=["before this state version", "one commit before"])
def older_root(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """An image of older code, by its own Containerfile's words, which are today's."""
    commit = (
        history.before_state_version(STATE_VERSION)
        if "state" in request.param
        else history.commit_before()
    )
    source = history.checkout(
        commit, tmp_path_factory.mktemp("source"), "acpfs", "pyproject.toml", "README.md", "LICENSE"
    )
    with node_rig.image(tmp_path_factory.mktemp("older"), source) as made:
        yield made


@pytest.fixture
def node(tmp_path: Path, root: Path) -> Iterator[Node]:
    with node_rig.node(tmp_path, root) as made:
        yield made


class Cluster:
    """The manifests on one node."""

    def __init__(self, node: Node, *options: str) -> None:
        self.node = node
        self.documents = manifests(*OPTIONS, *(options or ("--ram", "512M")))
        self.mountpoint = node.host / MOUNTPOINT.lstrip("/")
        self.backing = node.claim("checkpoints")

    def daemon(self, uid: str, root: Path | None = None) -> Container:
        return self.node.start(
            pod_of(self.documents, "DaemonSet", "acpfs"), self.documents, uid, root=root
        )

    def keeper(self) -> Container:
        made = self.node.start(
            pod_of(self.documents, "DaemonSet", "acpfs-keeper"), self.documents, "keeper"
        )
        wait_for("the keeper answers", lambda: made.ended() is not None or self.held() is not None)
        assert made.ended() is None, made.said()
        return made

    def held(self) -> list[dict[str, Any]] | None:
        return keeper_client.held(self.node.directory("/run/acpfs") / keeper_client.SOCKET)

    def job(self) -> Job:
        return Job(self)

    def is_mounted(self) -> bool:
        return "fuse.acpfs" in kinds_at(self.mountpoint)


class Job:
    """A training pod: it has what the example job has, and a directory of its own in which it
    tells.
    """

    def __init__(self, cluster: Cluster) -> None:
        pod = json.loads(json.dumps(pod_of(cluster.documents, "Job", "acpfs-example")))
        (train,) = pod["containers"]
        train["command"] = ["python3", "-c", JOB, MOUNTPOINT, "/told"]
        train["volumeMounts"].append({"name": "told", "mountPath": "/told"})
        pod["volumes"].append({"name": "told", "hostPath": {"path": "/told"}})
        self._directory = cluster.node.directory("/told")
        assert cluster.node.start(pod, cluster.documents, "job", init=True).wait() == 0
        self.container = cluster.node.start(pod, cluster.documents, "job")
        wait_for("the job saves", self.steps)

    def told(self) -> dict[str, Any]:
        path = self._directory / "told"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"steps": 0}
        return found

    def steps(self) -> int:
        assert self.container.ended() is None, self.container.said()
        return int(self.told()["steps"])

    def wait_step(self) -> None:
        """It saves on: the save that is under way ends, and another one."""
        seen = self.steps()
        wait_for("the job goes on", lambda: self.steps() > seen + 1)

    def end(self) -> dict[str, Any]:
        (self._directory / "stop").write_text("")
        code = self.container.wait()
        assert code == 0, self.container.said()
        return self.told()


def check_stored(cluster: Cluster, told: dict[str, Any]) -> None:
    stored = cluster.backing / "job"
    sums = {
        name: subprocess.run(
            ["sha256sum", stored / name], capture_output=True, text=True, check=True
        ).stdout[:64]
        for name in told["sums"]
    }
    assert sums == told["sums"]
    assert (stored / "log").stat().st_size == told["written"]


@pytest.mark.clause("S378")
def test_the_example_job_of_the_manifests_saves(node: Node) -> None:
    cluster = Cluster(node)
    keeper = cluster.keeper()
    daemon = cluster.daemon("uid-1")
    pod = pod_of(cluster.documents, "Job", "acpfs-example")
    init = node.start(pod, cluster.documents, "job", init=True)
    daemon.wait_ready()
    assert init.wait() == 0, init.said()
    status = json.loads(daemon.exec("acpfs-ctl", "status", "--json").stdout)
    assert status["state"] == "serving"
    assert status["worker"]["keeper"]
    assert status["transport"] == "native"
    train = node.start(pod, cluster.documents, "job")
    assert train.wait() == 0, train.said()
    assert (cluster.backing / "example/step-1.pt").stat().st_size == 64 * MIB
    assert daemon.terminate() == 0, daemon.said()
    assert not cluster.is_mounted()
    assert keeper.terminate() == 0, keeper.said()


@pytest.mark.clause("S370", "S378")
def test_a_daemon_container_is_killed_while_a_job_saves(node: Node) -> None:
    """The kernel asks for attributes each time, so whatever touches the mount before a daemon
    serves it waits.
    """
    cluster = Cluster(node, "--ram", "512M", "--attr-timeout", "0")
    cluster.keeper()
    daemon = cluster.daemon("uid-1")
    daemon.wait_ready()
    job = cluster.job()
    for turn in range(TURNS):
        daemon.kill()
        daemon = cluster.daemon("uid-1")  # the kubelet starts the container again
        daemon.wait_ready()
        job.wait_step()
        status = json.loads(daemon.exec("acpfs-ctl", "status", "--json").stdout)
        assert "keeper held" in status["worker"]["last_end"], daemon.said()
        print(
            f"kill {turn + 1}: without a daemon {status['worker']['pause_s']:.2f} s, longest "
            f"write {job.told()['longest_s']:.2f} s"
        )
    told = job.end()
    assert daemon.terminate() == 0, daemon.said()
    check_stored(cluster, told)


@pytest.mark.clause("S300", "S302", "S374", "S378")
def test_a_roll_out_from_container_to_container(node: Node) -> None:
    cluster = Cluster(node)
    cluster.keeper()
    daemon = cluster.daemon("uid-0")
    daemon.wait_ready()
    job = cluster.job()
    for turn in range(3):
        new = cluster.daemon(f"uid-{turn + 1}")
        new.wait_ready()
        probe = daemon.exec("acpfs-ctl", MOUNTPOINT, "ready", "--here")
        assert probe.returncode == 1, probe.stdout + probe.stderr
        job.wait_step()
        assert daemon.terminate() == 0, daemon.said()
        daemon = new
        job.wait_step()
    told = job.end()
    assert daemon.terminate() == 0, daemon.said()
    assert not cluster.is_mounted()
    check_stored(cluster, told)


@pytest.mark.clause("S300", "S378")
def test_a_roll_out_from_an_older_version(node: Node, older_root: Path) -> None:
    """An image of older code is the old pod; a job saves meanwhile."""
    cluster = Cluster(node)
    cluster.keeper()
    old = cluster.daemon("uid-old", older_root)
    old.wait_ready()
    job = cluster.job()
    new = cluster.daemon("uid-new")
    new.wait_ready()
    assert old.terminate() == 0, old.said()
    job.wait_step()
    new.kill()  # what the new one told the keeper is enough
    new = cluster.daemon("uid-new")
    new.wait_ready()
    job.wait_step()
    told = job.end()
    assert new.terminate() == 0, new.said()
    check_stored(cluster, told)


@pytest.mark.clause("S371", "S378")
def test_a_daemon_container_is_killed_where_there_is_no_keeper(node: Node) -> None:
    cluster = Cluster(node)
    daemon = cluster.daemon("uid-1")
    daemon.wait_ready()
    job = cluster.job()
    daemon.kill()
    assert job.container.wait() != 0  # it gets ENOTCONN, and its scheduler starts it again
    assert (
        "Transport endpoint is not connected" in job.container.said()
        or "ConnectionAborted" in job.container.said()
    ), job.container.said()
    daemon = cluster.daemon("uid-1")
    daemon.wait_ready()
    again = cluster.job()  # a new container sees the new mount
    again.wait_step()
    told = again.end()
    assert daemon.terminate() == 0, daemon.said()
    check_stored(
        cluster, {"sums": told["sums"], "written": (cluster.backing / "job/log").stat().st_size}
    )


@pytest.mark.clause("S378")
def test_a_daemon_container_that_is_ended_drains_first(node: Node) -> None:
    cluster = Cluster(node, "--ram", "512M", "--bandwidth", "32M")
    daemon = cluster.daemon("uid-1")
    daemon.wait_ready()
    data = os.urandom(MIB) * 128
    (cluster.mountpoint / "last.pt").write_bytes(data)
    assert not (cluster.backing / "last.pt").exists()
    assert daemon.terminate() == 0, daemon.said()
    assert (cluster.backing / "last.pt").read_bytes() == data
    assert not cluster.is_mounted()


@pytest.mark.clause("S381")
def test_a_job_that_mounts_in_its_own_container_drains_before_it_ends(node: Node) -> None:
    """`--inside`: no daemon on the node, no propagation, CAP_SYS_ADMIN and /dev/fuse only."""
    documents = manifests(*OPTIONS, "--ram", "256M", "--inside", "--bandwidth", "32M")
    job = node.start(pod_of(documents, "Job", "acpfs-example"), documents, "job")
    assert job.wait() == 0, job.said()
    assert (node.claim("checkpoints") / "step-1.pt").stat().st_size == 64 * MIB


@pytest.mark.clause("S381")
def test_a_job_that_mounts_in_its_own_container_is_told_to_end(node: Node) -> None:
    """SIGTERM reaches the training; what it saved on its way out is stored before the container
    ends, with the training's exit code.
    """
    documents = manifests(*OPTIONS, "--ram", "256M", "--inside", "--bandwidth", "32M")
    pod = json.loads(json.dumps(pod_of(documents, "Job", "acpfs-example")))
    (train,) = pod["containers"]
    mounts = train["command"][: train["command"].index("--") + 1]
    train["command"] = [*mounts, "sh", "-c", LAST_SAVE, MOUNTPOINT]
    job = node.start(pod, documents, "job")
    wait_for("it trains", lambda: job.ended() is not None or "training" in job.said())
    assert job.ended() is None, job.said()
    assert job.terminate() == 7, job.said()
    assert (node.claim("checkpoints") / "last.pt").stat().st_size == 64 * MIB


LAST_SAVE = """
trap 'dd if=/dev/zero of="$0/last.pt" bs=1M count=64 2>/dev/null; exit 7' TERM
echo training
while :; do sleep 0.1; done
"""

SAVER = """
import os, sys, time
top, mib, told = sys.argv[1], int(sys.argv[2]), sys.argv[3]
with open(top + "/saved.pt", "wb", buffering=0) as file:
    for _ in range(mib):
        assert file.write(bytes(1 << 20)) == 1 << 20
open(told + "/saved", "w").close()
while not os.path.exists(told + "/stop"):
    time.sleep(0.05)
"""


def shmem_of(group: Path) -> int:
    """Bytes of tmpfs for which it pays."""
    fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int(fields["shmem"])


@pytest.mark.clause("S378", "S243")
@pytest.mark.parametrize(
    ("sees_pids", "limit", "who_pays"),
    [(True, "4Gi", "job"), (True, "128Mi", "daemon"), (False, "1Gi", "daemon")],
    ids=["a roomy limit", "a limit that it would reach", "a daemon that cannot see the job"],
)
def test_whose_control_group_pays_for_what_a_job_saves(
    node: Node, sees_pids: bool, limit: str, who_pays: str
) -> None:
    """The job in a PID name space and a memory control group of its own, as pods have them; a save
    of 100 MiB.
    """
    cluster = Cluster(node, "--ram", "512M", "--bandwidth", "1M")
    daemon_pod = json.loads(json.dumps(pod_of(cluster.documents, "DaemonSet", "acpfs")))
    daemon_pod["hostPID"] = sees_pids
    daemon = node.start(daemon_pod, cluster.documents, "uid-1")
    daemon.wait_ready()
    pod = json.loads(json.dumps(pod_of(cluster.documents, "Job", "acpfs-example")))
    (train,) = pod["containers"]
    train |= {
        "command": ["python3", "-c", SAVER, MOUNTPOINT, "100", "/told"],
        "resources": {"limits": {"memory": limit}},
    }
    train["volumeMounts"].append({"name": "told", "mountPath": "/told"})
    pod["volumes"].append({"name": "told", "hostPath": {"path": "/told"}})
    told = node.directory("/told")
    job = node.start(pod, cluster.documents, "job")
    if not (job.group / "memory.stat").exists():
        pytest.skip("no memory controller here")
    wait_for("it has saved", lambda: job.ended() is not None or (told / "saved").exists())
    assert job.ended() is None, job.said()
    status = json.loads(daemon.exec("acpfs-ctl", "status", "--json").stdout)
    print(status["lane_choices"], shmem_of(job.group), shmem_of(daemon.group))
    pays, other = (job.group, daemon.group) if who_pays == "job" else (daemon.group, job.group)
    assert shmem_of(pays) >= 100 * MIB
    assert shmem_of(other) < 50 * MIB
    reason = {"job": "passthrough", "daemon": "no room for it" if sees_pids else "is not known"}[
        who_pays
    ]
    assert any(reason in choice for choice in status["lane_choices"]), status["lane_choices"]
    (told / "stop").write_text("")
    assert job.wait() == 0, job.said()
