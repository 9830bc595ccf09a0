"""A MooseFS of one master and two chunk servers, goal 2, and its faults.

Chunks lie on the disk below `base`, or, with `server_bytes`, on a tmpfs of that size for each
server inside the servers' name space. The version of Debian 12 is 3.0.117.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.rig.storage.servers import ADDRESS, Storage, until

FIRST_PORT = 9432
MASTER_MAGIC = b"MFSM NEW"
"""Content of the metadata file of a file system in which nothing is."""
LOOP_S = 60
"""So often the master looks for bytes that no file has any more; 300 by default, and no less than
this.
"""
AS_ROOT = "WORKING_USER=root\nWORKING_GROUP=root\nNICE_LEVEL=0\n"


class MooseFs(Storage):
    """Every chunk lies on both servers.

    Clients wait for servers that are gone, for ever, unless they are mounted with `mfstimeout`.
    """

    name = "moosefs"
    data_servers = 2

    def start(self) -> None:
        for directory in ("cfg", "master"):
            (self.base / directory).mkdir()
        (self.base / "master" / "metadata.mfs").write_bytes(MASTER_MAGIC)
        self._write("exports", "*  /  rw,alldirs,admin,maproot=0:0\n*  .  rw\n")
        self._write("topology", "")
        listen = "".join(f"{who}_LISTEN_HOST={ADDRESS}\n" for who in ("MATOML", "MATOCS", "MATOCL"))
        files = (
            f"EXPORTS_FILENAME={self.base}/cfg/exports\n"
            f"TOPOLOGY_FILENAME={self.base}/cfg/topology\n"
        )
        soon = f"REPLICATIONS_DELAY_INIT=5\nCHUNKS_LOOP_MIN_TIME={LOOP_S}\n"
        self._write("master.cfg", f"{AS_ROOT}DATA_PATH={self.base}/master\n{files}{listen}{soon}")
        self._start_master()
        for number in range(self.data_servers):
            self._configure_chunks(number)
            self._start_chunks(number)
        self._first_client()

    def _write(self, name: str, text: str) -> None:
        (self.base / "cfg" / name).write_text(text)

    def _configure_chunks(self, number: int) -> None:
        disk = self.base / f"disk{number}"
        data = self.base / f"chunks{number}"
        disk.mkdir()
        data.mkdir()
        if self.server_bytes is not None:
            self.servers.run(
                "mount", "-t", "tmpfs", "-o", f"size={self.server_bytes}", "none", str(disk)
            )
        self._write(f"disk{number}", f"{disk}\n")
        listen = f"CSSERV_LISTEN_HOST={ADDRESS}\nCSSERV_LISTEN_PORT={FIRST_PORT + number}\n"
        where = (
            f"DATA_PATH={data}\nHDD_CONF_FILENAME={self.base}/cfg/disk{number}\n"
            "HDD_LEAVE_SPACE_DEFAULT=8MiB\n"
        )
        self._write(
            f"chunks{number}.cfg",
            f"{AS_ROOT}{where}MASTER_HOST={ADDRESS}\nMASTER_RECONNECTION_DELAY=1\n{listen}",
        )

    def _start_master(self) -> None:
        self.servers.start(
            "master", "mfsmaster", "-a", "-f", "-c", f"{self.base}/cfg/master.cfg", "start"
        )

    def _start_chunks(self, number: int) -> None:
        self.servers.start(
            f"chunks{number}",
            "mfschunkserver",
            "-f",
            "-c",
            f"{self.base}/cfg/chunks{number}.cfg",
            "start",
        )

    def _first_client(self) -> None:
        """Goal 2 and no trash (a day by default) for all that will be there, and wait until both
        servers have told their room.
        """
        root = self.base / "root"
        root.mkdir()
        until(lambda: self._try_mount(root) == 0, "the master answers")
        try:
            self.servers.run(
                "mfssetgoal", "-r", str(self.data_servers), str(root), hosts_mounts=True
            )
            self.servers.run("mfssettrashtime", "-r", "0", str(root), hosts_mounts=True)
            until(
                lambda: self._chunk_servers(root) == self.data_servers,
                "the chunk servers are known",
            )
        finally:
            self.unmount(root)

    def _chunk_servers(self, root: Path) -> int:
        """How many have room, by what they have of it: each is as large as the others."""
        if self.server_bytes is None:
            return self.data_servers if os.statvfs(root).f_blocks else 0
        space = os.statvfs(root)
        return round(space.f_blocks * space.f_frsize / self.server_bytes)

    def _mount(self, path: Path, *options: str) -> None:
        until(lambda: self._try_mount(path, *options) == 0, "the client is mounted")

    def _try_mount(self, path: Path, *options: str) -> int:
        words = ",".join([f"mfsmaster={ADDRESS}", "mfsallowoomkiller", "mfsnice=0", *options])
        return self.servers.run(
            "mfsmount", str(path), "-o", words, check=False, hosts_mounts=True
        ).returncode

    def free_bytes(self, client: Path) -> int:
        """It tells the room for copies."""
        return super().free_bytes(client) // self.data_servers

    def servers_of_data(self) -> list[int]:
        return self.servers.pids("mfschunkserver")

    def server(self, number: int) -> list[int]:
        return self.servers.pids("mfschunkserver", f"chunks{number}.cfg")

    def master(self) -> list[int]:
        """The process that has all names; the file system is nothing without it."""
        return self.servers.pids("mfsmaster", "-c")

    def restart(self) -> None:
        if not self.master():
            self._start_master()
        for number in range(self.data_servers):
            if not self.server(number):
                self._start_chunks(number)
        until(
            lambda: bool(self.master()) and len(self.servers_of_data()) == self.data_servers,
            "all servers live",
        )
