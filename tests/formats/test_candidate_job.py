"""A job whose coordinators and ranks are partly of the version that was cut last, as on a cluster
where nodes are brought up one after the other.

FORMATS says that a job has one acpfs: what is newer on the wire is refused. As long as nothing is
newer there, both sides have to finish a gasp with each other; when WIRE_VERSION grows, these say
so, and `test_newer.py` has the refusal.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from acpfs.training.messages import WIRE_VERSION, ExitStatus
from tests.rig.history import checkout, released
from tests.rig.mounts import REPOSITORY
from tests.training.gasp_job import GaspJob, until

pytestmark = pytest.mark.clause("S565")
PAIRS = {"opt0": (0, 1), "opt1": (2, 3)}
MARKS = {"0": (5, "ready"), "1": (5, "updating"), "2": (6, "computing"), "3": (5, "ready")}
TODAY = "today"
CANDIDATE = "candidate"


@pytest.fixture(scope="module")
def codes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both versions, each with the members that its own tests have."""
    parts = ("acpfs", "tests/__init__.py", "tests/rig", "tests/training")
    code = checkout(released(), tmp_path_factory.mktemp("candidate"), *parts)
    if f"\nWIRE_VERSION = {WIRE_VERSION}\n" not in (code / "acpfs/training/messages.py").read_text(
        encoding="utf-8"
    ):
        pytest.skip("the wire has another version: it is refused")
    return {TODAY: REPOSITORY, CANDIDATE: code}


class MixedJob(GaspJob):
    """Its members are of one version, and each coordinator of one."""

    def __init__(
        self, directory: Path, members: Path, coordinators: list[Path], **config: object
    ) -> None:
        self._members_code = members
        self._coordinator_codes = coordinators
        super().__init__(directory, 4, PAIRS, marks=MARKS, coordinators=len(coordinators), **config)

    def _start(self, module: str, *arguments: str) -> subprocess.Popen[str]:
        code = self._members_code
        if module == "acpfs.training.coordinator":
            code = self._coordinator_codes[int(arguments[arguments.index("--number") + 1])]
        # Python looks for `-m` where it is begun, and there first.
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True, cwd=code
        )


@pytest.mark.parametrize(("members", "coordinator"), [(TODAY, CANDIDATE), (CANDIDATE, TODAY)])
def test_ranks_of_one_version_leave_a_gasp_by_a_coordinator_of_the_other(
    tmp_path: Path, codes: dict[str, Path], members: str, coordinator: str
) -> None:
    with MixedJob(tmp_path, codes[members], [codes[coordinator]]) as job:
        job.wait("Protected", 0, 1, 2, 3)
        job.kill(1)
        assert [job.left(rank)["status"] for rank in (0, 2, 3)] == [ExitStatus.SAVED] * 3
        assert job.coordinators[0].wait(60) == 0
        (manifest,) = job.published()
        assert (manifest["step"], manifest["lost"]) == (6, [1])


@pytest.mark.parametrize(("first", "second"), [(TODAY, CANDIDATE), (CANDIDATE, TODAY)])
def test_a_standby_of_the_other_version_goes_on_in_the_middle_of_a_gasp(
    tmp_path: Path, codes: dict[str, Path], first: str, second: str
) -> None:
    with MixedJob(tmp_path, codes[TODAY], [codes[first], codes[second]], hold="Settle") as job:
        job.wait("Protected", 0, 1, 2, 3)
        until(lambda: job.status(1)["connected"] == 4)
        job.kill(3)
        job.wait("Settle", 0, 1, 2)
        job.coordinators[0].kill()
        (job.log / "release").touch()
        assert {job.left(rank)["status"] for rank in (0, 1, 2)} == {ExitStatus.SAVED}
        (manifest,) = job.published()
        assert (manifest["step"], manifest["lost"]) == (6, [3])
        assert job.coordinators[1].wait(60) == 0
