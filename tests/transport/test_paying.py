"""A trainer in a real memory control group with a limit: it never dies of pages that acpfs keeps
for it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from acpfs.descriptors import readable
from tests.rig.mounts import AcpfsMount

MIB = 1 << 20
FILE = 32 * MIB
ANSWER_S = 60.0
HIERARCHIES = {
    "v2": (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    "v1": (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
}
TRAINER = """
import os, sys
group, held = sys.argv[1], []
with open(group + "/cgroup.procs", "w") as procs:
    procs.write(str(os.getpid()))
for line in sys.stdin:
    what, argument = line.split()
    if what == "save":
        with open(argument, "wb", buffering=0) as file:
            for _ in range(32):
                file.write(bytes(1 << 20))
    else:
        held.append(b"x" * (int(argument) << 20))
    print("done", flush=True)
"""

pytestmark = [
    pytest.mark.mount,
    pytest.mark.transports("native"),
    pytest.mark.skipif(
        os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
    ),
]


def hierarchy() -> tuple[Path, str, str] | None:
    """Where groups with a memory limit can be made on this machine, without changing anything of
    others.
    """
    for kind, (top, limit, use) in HIERARCHIES.items():
        enabled = top / "cgroup.subtree_control"
        if (kind == "v1" and (top / limit).exists()) or (
            enabled.exists() and "memory" in enabled.read_text().split()
        ):
            return (
                (top, limit, use)
                if os.access(top, os.W_OK) and not os.statvfs(top).f_flag & os.ST_RDONLY
                else None
            )
    return None


class Trainer:
    """A process in a control group of its own, which saves and takes memory as it is told."""

    def __init__(self, limit_bytes: int) -> None:
        found = hierarchy()
        if found is None:
            pytest.skip("no memory control group can be made here")
        top, limit, use = found
        self.group = top / f"acpfs-test-{os.getpid()}"
        self.group.mkdir()
        (self.group / limit).write_text(str(limit_bytes))
        self._use = self.group / use
        command = [sys.executable, "-c", TRAINER, str(self.group)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def do(self, what: str, argument: object) -> bool:
        """Whether it lived through it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what} {argument}\n")
        assert readable(self._process.stdout, ANSWER_S)
        return self._process.stdout.readline() == "done\n"

    def charged_bytes(self) -> int:
        return int(self._use.read_text())

    def end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self.group.rmdir()


@pytest.fixture
def trainer(request: pytest.FixtureRequest) -> Iterator[Trainer]:
    made = Trainer(request.param)
    yield made
    made.end()


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[AcpfsMount]:
    (tmp_path / "backing").mkdir()
    with AcpfsMount(
        tmp_path / "backing", tmp_path / "mnt", "native", ram="256M", watchdog_s=120
    ) as made:
        if "passthrough" not in made.status()["lanes"]:
            pytest.skip("this kernel has no passthrough")
        yield made


@pytest.mark.clause("S243")
@pytest.mark.parametrize("trainer", [96 * MIB], indirect=True)
def test_a_tight_group_does_not_pay(mount: AcpfsMount, trainer: Trainer) -> None:
    for number in (1, 2):
        assert trainer.do("save", mount.path / f"iter_{number}.pt")
    assert trainer.do("take", 60)
    assert "the writer's memory control group has no room for it" in mount.status()["lane_choices"]


@pytest.mark.clause("S243")
@pytest.mark.parametrize("trainer", [256 * MIB], indirect=True)
def test_a_roomy_group_pays_and_gets_the_pages_back_when_it_needs_them(
    mount: AcpfsMount, trainer: Trainer
) -> None:
    for number in (1, 2):
        assert trainer.do("save", mount.path / f"iter_{number}.pt")
    assert mount.status()["lane_choices"]["passthrough"] == 1
    mount.run("acpfs-ctl", str(mount.path), "flush")
    assert trainer.do("take", 128)
    assert trainer.charged_bytes() >= 128 * MIB + FILE
    assert trainer.do("take", 32)
    mount.wait_status(
        lambda status: status["ram"]["clean_bytes"] == FILE
    )  # that the daemon paid for stays
    assert trainer.do("take", 60)  # for which there was no room beside the file
