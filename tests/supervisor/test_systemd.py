"""What lies in systemd/: the unit is accepted by systemd, the example configuration by acpfs."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from acpfs.config import load_settings
from acpfs.supervisor.privileges import KEPT

DIRECTORY = Path(__file__).parents[2] / "systemd"
NAME_SPACE_OPTIONS = re.compile(
    r"^(Protect(System|Home|KernelTunables|KernelModules|KernelLogs|ControlGroups|Proc)|Private(Tmp|Devices|Mounts|Users)|"
    r"(ReadOnly|ReadWrite|Inaccessible|Bind|TemporaryFileSystem)\w*|RootDirectory|RootImage|MountAPIVFS|DynamicUser)=",
    re.MULTILINE,
)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "acpfs@.service"
    shutil.copy(DIRECTORY / unit.name, unit)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / "acpfs@x.service")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_makes_no_mount_name_space() -> None:
    """The mount and the RAM tier would be invisible outside, and vanish with the daemon."""
    assert NAME_SPACE_OPTIONS.search((DIRECTORY / "acpfs@.service").read_text()) is None


def test_the_unit_allows_what_the_daemon_keeps_and_how_it_drops_the_rest() -> None:
    (line,) = re.findall(
        r"^CapabilityBoundingSet=(.*)$", (DIRECTORY / "acpfs@.service").read_text(), re.MULTILINE
    )
    assert {name.removeprefix("CAP_") for name in line.split()} == KEPT.keys() | {"SETPCAP"}
    table = (
        (DIRECTORY.parent / "docs/OPERATIONS.md")
        .read_text()
        .partition("| capability | for |")[2]
        .partition("\n\n")[0]
    )
    assert (
        set(
            re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b|\bCHOWN|\bFOWNER|\bFSETID|\bMKNOD|\bSETFCAP", table)
        )
        == KEPT.keys()
    )


def test_the_unit_waits_longer_than_the_drain() -> None:
    unit = (DIRECTORY / "acpfs@.service").read_text()
    stop_s = int(re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[0])
    assert stop_s > load_settings({}, DIRECTORY / "example.toml").drain_timeout_s
    assert "Type=notify" in unit
    assert "RuntimeDirectoryPreserve=yes" in unit
    assert (
        "OOMPolicy=continue" in unit
    )  # by default a killed worker takes supervisor and mount along


def test_the_example_configuration_is_valid_also_with_everything_in_it(tmp_path: Path) -> None:
    settings = load_settings({}, DIRECTORY / "example.toml")
    assert str(settings.mountpoint) == "/mnt/acp"
    everything = tmp_path / "all.toml"
    everything.write_text(
        re.sub(r"^# (\w+ = )", r"\1", (DIRECTORY / "example.toml").read_text(), flags=re.MULTILINE)
    )
    assert load_settings({}, everything).metrics_port == 9311
