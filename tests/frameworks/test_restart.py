"""A training loop that is killed goes on bit-identical: from RAM, and from the backing directory
when the RAM tier was lost.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.frameworks.conftest import WORKLOAD_TIMEOUT_S as TIMEOUT_S
from tests.frameworks.conftest import WORKLOADS, run
from tests.rig.faultfs import FaultFs
from tests.rig.mounts import AcpfsMount

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.slow,
    pytest.mark.mount,
    pytest.mark.timeout(1800),
]
FILES = 4
"""Of a checkpoint that is brought to RAM, with the pointer to it."""
STEPS = 10
DIE_AT = 8
SAVED = (6, 9)
"""From where it goes on: after its death, and after the machine's, which takes the RAM tier when
the loop has ended.
"""


@pytest.fixture(scope="module")
def expected(torch_python: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the loop ends with when nothing interrupts it."""
    return run(
        [
            torch_python,
            str(WORKLOADS / "training_loop.py"),
            str(tmp_path_factory.mktemp("plain")),
            str(STEPS),
        ]
    ).splitlines()[1]


@pytest.mark.clause("S105")
def test_goes_on_bit_identical(
    tmp_path: Path, torch_python: str, transport: str, expected: str
) -> None:
    loop = [torch_python, str(WORKLOADS / "training_loop.py")]
    with FaultFs(tmp_path / "source", tmp_path / "backing") as faults:
        mount = AcpfsMount(
            faults.path, tmp_path / "mount", transport, ram="256M", node_id="restart"
        )
        with mount:
            top = mount.path / "run"
            top.mkdir()
            died = subprocess.run(
                [*loop, str(top), str(STEPS), str(DIE_AT)],
                timeout=TIMEOUT_S,
                check=False,
                capture_output=True,
            )
            assert died.returncode < 0, died
            for lost, saved in enumerate(SAVED):
                mount.flush()
                if lost:
                    mount.abort()  # every process, the tmpfs and what lay in it
                    mount.start(preload="latest")
                    mount.wait_status(lambda status: status["counters"]["warmed_verified"] >= FILES)
                read = faults.slow(0.0, ["read"], glob="run*")
                printed = run([*loop, str(top), str(STEPS)]).splitlines()
                assert printed == [f"from {saved}", expected]
                assert faults.hits(read) == 0, "it was not loaded from RAM"
