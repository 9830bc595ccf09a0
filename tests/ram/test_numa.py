"""Memory policies of the RAM tier: what the setting may say, what the machine has, what the kernel
then shows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from acpfs.config import validated
from acpfs.errors import ConfigError, MachineError
from acpfs.ram import place as places
from acpfs.ram.mounts import mount_table, mounted_at, unmount
from acpfs.ram.numa import NODES, mount_option, policy_of

MIB = 1 << 20
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="mounts a tmpfs")
needs_nodes = pytest.mark.skipif(not NODES.exists(), reason="a kernel without NUMA nodes")


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "tiers"
    for entry in reversed(mount_table()):
        if entry.path.startswith(str(tmp_path)):
            unmount(entry.path, detach=True)


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    (tmp_path / "has_memory").write_text("0-2,5\n")
    return tmp_path


@pytest.mark.parametrize(
    "numa", ["default", "local", "interleave", "interleave:0-3,7", "bind:0", "prefer:12"]
)
def test_policies(numa: str) -> None:
    assert validated({"backing": "/b", "mountpoint": "/m", "numa": numa}).numa == numa


@pytest.mark.parametrize(
    "numa",
    [
        "",
        "bind",
        "bind:",
        "bind:0,",
        "prefer:0-1",
        "prefer",
        "strict:0",
        "bind:0,size=1",
        "local:0",
        "bind:-1",
    ],
)
def test_what_is_no_policy_is_refused(numa: str) -> None:
    with pytest.raises(ConfigError, match="numa"):
        validated({"backing": "/b", "mountpoint": "/m", "numa": numa})


def test_options(nodes: Path) -> None:
    assert mount_option("default", nodes / "missing") == ""
    assert mount_option("interleave", nodes) == ",mpol=interleave"
    assert mount_option("bind:0,2,5", nodes) == ",mpol=bind:0,2,5"


def test_nodes_that_are_not_there_are_named(nodes: Path) -> None:
    with pytest.raises(MachineError, match=r"no memory on NUMA node 3, 4 \(it has some on 0-2,5\)"):
        mount_option("bind:1-5", nodes)
    with pytest.raises(MachineError, match="knows no NUMA nodes"):
        mount_option("local", nodes / "missing")


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ("rw,size=1k", "default"),
        ("rw,mpol=local", "local"),
        ("rw,mpol=bind:0,2-3,huge=always", "bind:0,2-3"),
        ("mpol=prefer:1,x", "prefer:1"),
    ],
)
def test_the_mount_table_is_understood(options: str, policy: str) -> None:
    assert policy_of(options) == policy


@needs_root
@needs_nodes
def test_the_tier_gets_its_policy_and_a_later_mount_another(tiers: Path) -> None:
    for numa, shown in (("bind:0", "bind:0"), ("prefer:0", "prefer:0"), ("default", "local")):
        place = places.take(tiers, "vol", "n1", Path("/backing"), 8 * MIB, numa=numa)
        entry = mounted_at(str(place.directory / places.DATA))
        assert entry is not None
        assert policy_of(entry.options) == shown
        places.let_go(place)


@needs_root
@needs_nodes
def test_spare_memory_is_like_the_tiers_and_leaves_nothing_behind(tiers: Path) -> None:
    place = places.take(tiers, "vol", "n1", Path("/backing"), 8 * MIB, numa="bind:0")
    fd = places.spare_tmpfs(place, 4 * MIB)
    assert fd is not None
    assert os.pwrite(fd, bytes(4 * MIB), 0) == 4 * MIB
    assert places.taken_bytes(place) == 0, "it is not in the tier"
    with pytest.raises(OSError, match="No space left"):
        os.pwrite(fd, b"x", 4 * MIB)
    os.close(fd)
    assert [
        entry.path
        for entry in mount_table()
        if entry.path.startswith(str(place.directory / "spare"))
    ] == []
    places.give_up(place)
