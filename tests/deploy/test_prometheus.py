"""A real Prometheus scrapes a real mount, and an alert fires for a storage that stands still, and
ends with it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from acpfs.control import metric_table
from tests.deploy.prometheus_rig import LIMIT_S, prometheus
from tests.deploy.slurm_rig import wait_for
from tests.rig.faultfs import FaultFs
from tests.rig.mounts import MakeMount
from tests.rig.ports import free_port

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's prometheus"),
]


@pytest.mark.clause("S320", "S321")
def test_a_storage_that_stands_still_fires_and_one_that_goes_on_does_not(
    make_mount: MakeMount, fault_fs: FaultFs, tmp_path: Path
) -> None:
    metrics_port = free_port()
    mount = make_mount(fault_fs.path, "native", metrics_port=metrics_port)
    (tmp_path / "prometheus").mkdir()
    with prometheus(tmp_path / "prometheus", metrics_port) as watching:
        wait_for("the mount is scraped", lambda: watching.ask('up{job="acpfs"} == 1'), LIMIT_S)
        (series,) = watching.ask("acpfs_ram_budget_bytes")
        assert series["metric"]["mount"] == str(mount.path)
        known = set(watching.get("/api/v1/label/__name__/values"))
        absent = {
            name for name in metric_table.GAUGES if f"{metric_table.PREFIX}{name}" not in known
        }
        has_not = ("spill_", "mirror_", "copies_")
        assert [name for name in sorted(absent) if not name.startswith(has_not)] == []
        assert watching.firing() == set()

        fault_fs.freeze(["write", "rename"])
        (mount.path / "model.pt").write_bytes(b"x" * (1 << 20))
        wait_for(
            "both alerts fire",
            lambda: watching.firing() >= {"AcpfsBackingStuck", "AcpfsUnpersistedTooOld"},
            LIMIT_S,
        )

        fault_fs.thaw()
        mount.wait_drained()
        wait_for("no alert is left", lambda: watching.firing() == set(), LIMIT_S)
        (persisted,) = watching.ask("acpfs_persisted_bytes_total")
        assert float(persisted["value"][1]) >= 1 << 20
