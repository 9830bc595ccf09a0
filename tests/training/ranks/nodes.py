"""Two nodes on one machine: two mounts with different ids over one directory, and half of the ranks
saves through each.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from acpfs.control.runtime import ENVIRONMENT_VARIABLE
from tests.cluster.stand import Stand
from tests.rig.mounts import AcpfsMount
from tests.training.ranks.forked import Ranks, join_group
from tests.training.ranks.gasps import WORLD, Fault, train
from tests.training.ranks.networks import Networks
from tests.training.ranks.replaced import Site

NODES = 2
PER_NODE = WORLD // NODES


def node_of(rank: int) -> int:
    """Ranks 0 and 1 are on node 0: with HSDP each node has the whole state."""
    return rank * NODES // WORLD


def on_nodes(mounts: Sequence[AcpfsMount], run: str, cables: Networks | None = None) -> Site:
    """Ranks that are replaced, through one mount or half of them through each of two; with cables,
    each half has a network of its own.
    """

    def node(rank: int) -> int:
        return node_of(rank) if len(mounts) > 1 else 0

    def environment(rank: int) -> dict[str, str]:
        found = {ENVIRONMENT_VARIABLE: str(mounts[node(rank)].runtime_dir)}
        if len(mounts) > 1:
            found |= {
                "GROUP_RANK": str(node(rank)),
                "LOCAL_RANK": str(rank % PER_NODE),
                "LOCAL_WORLD_SIZE": str(PER_NODE),
            }
        found["MASTER_ADDR"] = Networks.address(0) if cables else "127.0.0.1"
        found["GLOO_SOCKET_IFNAME"] = cables.device if cables else "lo"
        return found

    return Site(
        lambda rank: mounts[node(rank)].path / run,
        environment,
        lambda rank: cables.enter(node(rank)) if cables else None,
    )


@contextlib.contextmanager
def ranks_on(stand: Stand, fault: Fault, directory: Path, **settings: Any) -> Iterator[Ranks]:
    """The job, started; `settings`: of `protect`."""

    def main(rank: int) -> None:
        mount = stand.nodes[node_of(rank)]
        os.environ[ENVIRONMENT_VARIABLE] = str(mount.runtime_dir)
        join_group(rank, WORLD, directory / "store")
        train(rank, fault, mount.path / "run", **settings)

    with Ranks(WORLD, directory, main) as ranks:
        yield ranks


def coordinators(mount: AcpfsMount, run: str = "") -> dict[int, int]:
    """Number → process, of those that this node's ranks started; `run`: for jobs that save in a
    directory of this name.
    """
    marker = f"{ENVIRONMENT_VARIABLE}={mount.runtime_dir}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if (
                    b"acpfs.training.coordinator" in words
                    and marker in (entry / "environ").read_bytes().split(b"\0")
                    and run.encode() in (words[3].rpartition(b"/")[2] if run else b"")
                ):
                    found[int(words[words.index(b"--number") + 1])] = int(entry.name)
    return found


def lose(mount: AcpfsMount, ranks: Ranks, node: int) -> None:
    """A node with all that it has: ranks, coordinator, mount; its RAM is gone with them."""
    for rank in range(WORLD):
        if node_of(rank) == node:
            ranks.kill(rank)
    for pid in coordinators(mount).values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    mount.kill()
