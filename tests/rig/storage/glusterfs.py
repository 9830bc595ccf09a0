"""A GlusterFS volume, replica 3, and its faults.

Bricks lie on the disk below `base`, or, with `server_bytes`, each on a tmpfs of that size inside
the servers' name space: quick, and full when it is meant to be. The version of Debian 12 is 10.3.
"""

from __future__ import annotations

from pathlib import Path

from tests.rig.storage.servers import ADDRESS, Storage, until

VOLUME = "v0"
PING_TIMEOUT_S = 4
"""How long a client waits for a brick that does not answer, at least; twice that at most.

GlusterFS's own is 42.
"""


class GlusterFs(Storage):
    """A volume of three bricks that all have everything."""

    name = "glusterfs"
    data_servers = 3

    def start(self) -> None:
        work = self.base / "glusterd"
        work.mkdir()
        text = (
            Path("/etc/glusterfs/glusterd.vol").read_text().replace("/var/lib/glusterd", str(work))
        )
        (self.base / "glusterd.vol").write_text(text)
        words = [
            "-f",
            str(self.base / "glusterd.vol"),
            "-p",
            str(self.base / "glusterd.pid"),
            "-l",
            str(self.base / "glusterd.log"),
        ]
        self.servers.run(
            "sh", "-c", "mkdir -p /run/log && mount --bind /run/log /var/log/glusterfs"
        )
        self.servers.start("glusterd.output", "glusterd", "-N", *words)
        until(lambda: self._order("volume", "list", check=False) == 0, "glusterd answers")
        bricks = [f"{ADDRESS}:{self._brick(number)}" for number in range(self.data_servers)]
        self._order("volume", "create", VOLUME, "replica", str(self.data_servers), *bricks, "force")
        self.set("network.ping-timeout", str(PING_TIMEOUT_S))
        self._order("volume", "start", VOLUME)

    def _brick(self, number: int) -> Path:
        place = self.base / f"brick{number}"
        place.mkdir()
        if self.server_bytes is not None:
            self.servers.run(
                "mount", "-t", "tmpfs", "-o", f"size={self.server_bytes}", "none", str(place)
            )
        return place / "files"

    def _mount(self, path: Path, *options: str) -> None:
        words = [
            f"--volfile-server={ADDRESS}",
            f"--volfile-id={VOLUME}",
            f"--log-file={path}.log",
            *options,
            str(path),
        ]
        self.servers.run("glusterfs", *words, hosts_mounts=True)

    def servers_of_data(self) -> list[int]:
        return self.servers.pids("glusterfsd", str(self.base))

    def server(self, number: int) -> list[int]:
        return self.servers.pids("glusterfsd", f"{self.base}/brick{number}/")

    def restart(self) -> None:
        """Again and again: glusterd may not have noticed yet that a brick is gone."""
        until(self._all_live, "all bricks live")

    def _all_live(self) -> bool:
        if len(self.servers_of_data()) < self.data_servers:
            self._order("volume", "start", VOLUME, "force", check=False)
        return len(self.servers_of_data()) == self.data_servers

    def set(self, key: str, value: str) -> None:
        """A volume option, e.g. `debug.error-gen`; holds at once."""
        self._order("volume", "set", VOLUME, key, value)

    def reset(self) -> None:
        """All volume options as they were at the start."""
        self._order("volume", "reset", VOLUME, "force")
        self.set("network.ping-timeout", str(PING_TIMEOUT_S))

    def _order(self, *words: str, check: bool = True) -> int:
        return self.servers.run("gluster", "--mode=script", *words, check=check).returncode
