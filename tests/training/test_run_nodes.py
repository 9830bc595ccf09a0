"""`acpfs-run` on several nodes: launchers that meet on one host, and, in the long run, in network
namespaces.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.rig.ports import free_port

clause = pytest.mark.clause
BOUND_S = 240.0
RANK = """
import os, signal, sys, time
names = ("RANK", "TORCHELASTIC_RESTART_COUNT", "ACPFS_GENERATION")
rank, attempt, generation = (int(os.environ[name]) for name in names)
def until(path):
    while not os.path.exists(path):
        time.sleep(0.01)
def note(word, text=None):
    name = f"{word}-{rank}-{attempt}-{generation}"
    open(name + ".tmp", "w").write(str(os.getpid()) if text is None else text)
    os.rename(name + ".tmp", name)
"""
Begin = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Starts the launcher of a node."""
    found: list[subprocess.Popen[str]] = []

    def begin(script: str, options: str, *before: str) -> subprocess.Popen[str]:
        (tmp_path / "rank.py").write_text(RANK + script, encoding="utf-8")
        words = [*before, sys.executable, "-m", "acpfs.cli.run", *options.split(), "rank.py"]
        found.append(
            subprocess.Popen(
                words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
        return found[-1]

    yield begin
    for process in found:
        process.kill()
        if process.stdout is not None and not process.stdout.closed:
            process.communicate()


def there(directory: Path, *names: str) -> list[str]:
    """What is in these files, as soon as they are there."""
    deadline = time.monotonic() + BOUND_S
    while not all((directory / name).exists() for name in names):
        assert time.monotonic() < deadline, sorted(os.listdir(directory))
        select.select([], [], [], 0.02)
    return [(directory / name).read_text() for name in names]


def statuses(*launchers: subprocess.Popen[str]) -> list[int]:
    for launcher in launchers:
        launcher.communicate(timeout=BOUND_S)
    return [launcher.returncode for launcher in launchers]


def meeting_of(launcher: subprocess.Popen[str]) -> list[int]:
    """The process in which launchers meet."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return [
        int(pid)
        for pid in children
        if b"coordinator.meeting" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


@clause("T72", "T73")
def test_two_nodes_a_fault_a_restart_and_a_meeting_that_is_killed(
    tmp_path: Path, begin: Begin
) -> None:
    script = """
names = ('GROUP_RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'ACPFS_JOB')
note('began', ''.join(os.environ[name] for name in names))
until(f'fail-{attempt}')
attempt == 0 and rank == 2 and sys.exit(3)
time.sleep(0 if attempt else 600)
"""
    options = (
        f"--nnodes 2 --max-restarts 1 --master-addr 127.0.0.1 --master-port {free_port()} "
        f"--save-dir {tmp_path}/save"
    )
    nodes = [
        begin(script, f"{options} --node-rank {number} --nproc-per-node {2 - number}")
        for number in (0, 1)
    ]
    began = there(tmp_path, *(f"began-{rank}-0-0" for rank in range(3)))
    assert [text[:3] for text in began] == ["003", "013", "103"]
    assert len({text[3:] for text in began}) == 1
    (meeting,) = meeting_of(nodes[0])
    os.kill(meeting, signal.SIGKILL)
    (tmp_path / "fail-0").touch()
    there(tmp_path, *(f"began-{rank}-1-0" for rank in range(3)))
    (tmp_path / "fail-1").touch()
    assert statuses(*nodes) == [0, 0]
    assert (tmp_path / "save" / ".acpfs-job" / "run-none" / "tls" / "key.pem").exists()


@clause("T72")
def test_sigterm_to_one_launcher_ends_all(tmp_path: Path, begin: Begin) -> None:
    script = (
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(75))\nnote('ready')\ntime.sleep(600)"
    )
    options = f"--nnodes 2 --rdzv-endpoint 127.0.0.1:{free_port()} --max-restarts 2"
    nodes = [begin(script, options), begin(script, options)]
    there(tmp_path, "ready-0-0-0", "ready-1-0-0")
    nodes[1].send_signal(signal.SIGTERM)
    assert statuses(*nodes) == [75, 75]


@pytest.mark.long
@clause("T72")
def test_a_launcher_that_dies_is_a_lost_node_and_another_takes_its_place(
    tmp_path: Path, begin: Begin
) -> None:
    script = "note('ready')\nuntil('end')"
    options = f"--nnodes 2 --rdzv-endpoint 127.0.0.1:{free_port()} --max-restarts 1 --node-rank"
    nodes = [begin(script, f"{options} {number}") for number in (0, 1)]
    there(tmp_path, "ready-0-0-0", "ready-1-0-0")
    nodes[1].kill()
    nodes[1].communicate()
    nodes.append(begin(script, f"{options} 1"))
    there(tmp_path, "ready-0-1-0", "ready-1-1-0")
    (tmp_path / "end").touch()
    assert statuses(nodes[0], nodes[2]) == [0, 0]


@clause("T123", "T125")
def test_node_0_is_lost_with_the_meeting_and_the_job_goes_on(tmp_path: Path, begin: Begin) -> None:
    """The others' ranks notice nothing; a launcher takes the place, and its ranks are told that
    they replace others.
    """
    script = "note('ready')\nuntil('end')"
    options = (
        f"--nnodes 3 --rdzv-endpoint 127.0.0.1:{free_port()} --on-fault replace --save-dir "
        f"{tmp_path}/save --node-rank"
    )
    nodes = [begin(script, f"{options} {number}") for number in (0, 1, 2)]
    pids = there(tmp_path, "ready-0-0-0", "ready-1-0-0", "ready-2-0-0")
    nodes[0].kill()
    nodes[0].communicate()
    there(tmp_path / "save" / ".acpfs-job" / "run-none", "meeting")
    nodes.append(begin(script, f"{options} 0"))
    there(tmp_path, "ready-0-0-1")
    for pid in pids[1:]:
        os.kill(int(pid), 0)
    (tmp_path / "end").touch()
    assert statuses(*nodes[1:]) == [0, 0, 0]


@pytest.mark.long
@clause("T124", "T125")
def test_one_of_two_nodes_is_lost_with_the_meeting_and_the_other_has_the_claim(
    tmp_path: Path, begin: Begin
) -> None:
    script = "note('ready')\nuntil('end')"
    options = (
        f"--nnodes 2 --rdzv-endpoint 127.0.0.1:{free_port()} --on-fault replace --save-dir "
        f"{tmp_path}/save --node-rank"
    )
    nodes = [begin(script, f"{options} {number}") for number in (0, 1)]
    there(tmp_path, "ready-0-0-0", "ready-1-0-0")
    nodes[0].kill()
    nodes[0].communicate()
    there(tmp_path / "save" / ".acpfs-job" / "run-none", "meeting")
    nodes.append(begin(script, f"{options} 0"))
    there(tmp_path, "ready-0-0-1")
    (tmp_path / "end").touch()
    assert statuses(*nodes[1:]) == [0, 0]


@pytest.mark.long
@clause("T125")
def test_where_node_0_is_lost_and_nobody_is_replaced_the_others_end_with_what_was_saved(
    tmp_path: Path, begin: Begin
) -> None:
    script = (
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(75 if rank == 1 else 1))\n"
        "note('ready')\ntime.sleep(600)"
    )
    options = f"--nnodes 3 --rdzv-endpoint 127.0.0.1:{free_port()} --node-rank"
    nodes = [begin(script, f"{options} {number}") for number in (0, 1, 2)]
    there(tmp_path, "ready-0-0-0", "ready-1-0-0", "ready-2-0-0")
    nodes[0].kill()
    assert statuses(*nodes[1:]) == [75, 75]


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two hosts on one bridge: 10.77.0.1 and 10.77.0.2."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("needs root and ip(8)")
    names = [f"acpfs-run-{os.getpid()}-{number}" for number in (0, 1)]
    veths = [f"acr{os.getpid() % 100000}{end}" for end in "ab"]
    calls = [f"netns add {name}" for name in names]
    calls += [
        f"link add {veths[0]} netns {names[0]} type veth peer name {veths[1]} netns {names[1]}"
    ]
    for number, name in enumerate(names):
        calls += [
            f"-n {name} addr add 10.77.0.{number + 1}/24 dev {veths[number]}",
            f"-n {name} link set {veths[number]} up",
        ]
        calls += [f"-n {name} link set lo up"]
    try:
        for call in calls:
            done = subprocess.run(
                ["ip", *call.split()], capture_output=True, text=True, check=False
            )
            if done.returncode:
                pytest.skip(f"no network namespaces here: {done.stderr.strip()}")
        yield [*names, veths[1]]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.mark.long
@clause("T72")
def test_nodes_with_networks_of_their_own_and_a_cut(
    tmp_path: Path, begin: Begin, namespaces: list[str]
) -> None:
    script = "note('ready', os.environ['MASTER_ADDR'])\nuntil('end' if attempt else 'never')"
    options = "--nnodes 1:2 --rdzv-endpoint 10.77.0.1:29400 --max-restarts 1 --shutdown-timeout 5"
    nodes = [
        begin(script, f"{options} --node-rank {number}", "ip", "netns", "exec", name)
        for number, name in enumerate(namespaces[:2])
    ]
    assert there(tmp_path, "ready-0-0-0", "ready-1-0-0") == ["10.77.0.1"] * 2
    subprocess.run(["ip", "-n", namespaces[1], "link", "set", namespaces[2], "down"], check=True)
    assert there(tmp_path, "ready-0-1-0") == ["127.0.0.1"]  # alone, after a last call
    assert not (tmp_path / "ready-1-1-0").exists()
    (tmp_path / "end").touch()
    assert statuses(*nodes) == [0, 69]


@pytest.mark.long
@clause("T124")
def test_a_cut_between_two_nodes_leaves_one_of_them(
    tmp_path: Path, begin: Begin, namespaces: list[str]
) -> None:
    script = "note('ready')\nuntil('end')"
    options = (
        "--nnodes 2 --rdzv-endpoint 10.77.0.1:29400 --on-fault replace --save-dir "
        f"{tmp_path}/save --shutdown-timeout 5"
    )
    nodes = [
        begin(script, f"{options} --node-rank {number}", "ip", "netns", "exec", name)
        for number, name in enumerate(namespaces[:2])
    ]
    there(tmp_path, "ready-0-0-0", "ready-1-0-0")
    subprocess.run(["ip", "-n", namespaces[1], "link", "set", namespaces[2], "down"], check=True)
    deadline = time.monotonic() + 2 * BOUND_S
    while all(node.poll() is None for node in nodes):
        assert time.monotonic() < deadline
        select.select([], [], [], 0.1)
    (ended,) = (node for node in nodes if node.poll() is not None)
    (other,) = (node for node in nodes if node is not ended)
    assert statuses(ended) == [69]
    claims = list((tmp_path / "save" / ".acpfs-job").glob("*/claim-0/*"))
    assert len(claims) == 1
    other.send_signal(signal.SIGTERM)
    assert statuses(other) == [143]
