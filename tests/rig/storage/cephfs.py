"""A CephFS of one monitor, one manager, one metadata server and two OSDs that both have everything;
by hand only, it needs 1.4 GB of RAM.

Objects lie in sparse files on the disk below `base`; `quota` makes the file system small. Clients
are ceph-fuse. The version of Debian 12 is 16.2.15.
"""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import Any

from tests.rig.storage.servers import ADDRESS, Storage, until

NAME = "cfs"
DATA = f"{NAME}_data"
METADATA = f"{NAME}_metadata"
GROUPS = "8"
"""Placement groups of a pool."""
OBJECT_BYTES = 4 << 30
"""Of an OSD's sparse file."""
NO_QUOTA = 0
SLOW_S = 120.0
"""A command that needs an OSD waits until one is there."""


class CephFs(Storage):
    """Calls wait for servers that are gone, for ever.

    A client that was fenced gets ESHUTDOWN until it is mounted anew.
    """

    name = "cephfs"
    data_servers = 2

    def start(self) -> None:
        self.conf = self.base / "ceph.conf"
        fsid = str(uuid.uuid4())
        self.conf.write_text(self._settings(fsid))
        for directory in ("mon", "mgr", "mds"):
            (self.base / directory).mkdir()
        addresses = f"[v2:{ADDRESS}:3300,v1:{ADDRESS}:6789]"
        self.servers.run(
            "monmaptool",
            "--create",
            "--fsid",
            fsid,
            "--addv",
            "a",
            addresses,
            str(self.base / "monmap"),
        )
        self.servers.run(
            "ceph-mon",
            "-c",
            str(self.conf),
            "--mkfs",
            "-i",
            "a",
            "--monmap",
            str(self.base / "monmap"),
        )
        self._start("mon", "a")
        until(lambda: self._order("status", check=False) == 0, "the monitor answers")
        self._start("mgr", "x")
        for number in range(self.data_servers):
            self._make_osd(number)
        for pool in (METADATA, DATA):
            self._order("osd", "pool", "create", pool, GROUPS)
        self._order("fs", "new", NAME, METADATA, DATA)
        self._start("mds", "m")
        until(
            lambda: "up:active" in json.dumps(self._json("mds", "stat")),
            "the metadata server is at work",
            SLOW_S,
        )
        self._first_client()

    def _settings(self, fsid: str) -> str:
        settings = {
            "fsid": fsid,
            "mon host": f"[v2:{ADDRESS}:3300,v1:{ADDRESS}:6789]",
            "public addr": ADDRESS,
            **{f"auth {who} required": "none" for who in ("cluster", "service", "client")},
            "osd pool default size": 2,
            "osd pool default min size": 1,
            "osd pool default pg autoscale mode": "off",
            "osd crush chooseleaf type": 0,
            "mon osd min down reporters": 1,
            "bluestore block size": OBJECT_BYTES,
            "mon data avail crit": 1,
            **{f"{who} data": self.base / f"{who}" for who in ("mon", "mgr", "mds")},
            "osd data": self.base / "osd$id",
            "log file": self.base / "$name.log",
            "run dir": "/run",
        }
        general = "".join(f"{key} = {value}\n" for key, value in settings.items())
        # sockets for orders are in the servers' own /run; a client cannot look at processes of
        # other name spaces for their groups
        own = (
            f"admin socket =\nlog file = {self.base}/client.$pid.log\nfuse set user groups = "
            "false\n"
        )
        return f"[global]\n{general}[client]\n{own}"

    def _make_osd(self, number: int) -> None:
        (self.base / f"osd{number}").mkdir()
        named = str(uuid.uuid4())
        self._order("osd", "new", named)  # numbers are given from 0 on
        self.servers.run(
            "ceph-osd", "-c", str(self.conf), "-i", str(number), "--mkfs", "--osd-uuid", named
        )
        self._start("osd", str(number))

    def _start(self, what: str, name: str) -> None:
        self.servers.start(
            f"{what}.{name}.output", f"ceph-{what}", "-f", "-c", str(self.conf), "-i", name
        )

    def _first_client(self) -> None:
        """Until the metadata server is at work and the manager knows how much room there is."""
        root = self.base / "root"
        root.mkdir()
        until(lambda: self._try_mount(root) == 0, "the metadata server answers", SLOW_S)
        try:
            until(lambda: os.statvfs(root).f_blocks > 0, "the OSDs are known", SLOW_S)
        finally:
            self.unmount(root)

    def _mount(self, path: Path, *options: str) -> None:
        until(lambda: self._try_mount(path, *options) == 0, "the client is mounted", SLOW_S)

    def _try_mount(self, path: Path, *options: str) -> int:
        words = [
            "-c",
            str(self.conf),
            "--client_mountpoint",
            "/",
            "--client_mount_timeout",
            "20",
            *options,
            str(path),
        ]
        return self.servers.run("ceph-fuse", *words, check=False, hosts_mounts=True).returncode

    def servers_of_data(self) -> list[int]:
        return self.servers.pids("ceph-osd -f")

    def server(self, number: int) -> list[int]:
        return self.servers.pids(f"ceph-osd -f -c {self.conf} -i {number} ")

    def master(self) -> list[int]:
        """The process that has all names; the file system is nothing without it."""
        return self.servers.pids("ceph-mds -f")

    def restart(self) -> None:
        for number in range(self.data_servers):
            if not self.server(number):
                self._start("osd", str(number))
        if not self.master():
            self._start("mds", "m")
        until(
            lambda: bool(self.master()) and len(self.servers_of_data()) == self.data_servers,
            "all servers live",
        )

    def quota(self, size: int) -> None:
        """The file system is full at so many bytes; at NO_QUOTA at the size of its disks."""
        self._order("osd", "pool", "set-quota", DATA, "max_bytes", str(size))

    def fence(self, path: Path) -> None:
        """Evict a client: nothing that it does is carried out any more, and it is told so, but for
        fsync.
        """
        session = self._session_of(path)
        self._order("tell", "mds.m", "client", "evict", f"id={session}")

    def _session_of(self, path: Path) -> int:
        sessions = self._json("tell", "mds.m", "client", "ls")
        return next(
            int(one["id"]) for one in sessions if one["client_metadata"]["mount_point"] == str(path)
        )

    def _json(self, *words: str) -> Any:
        """What an order answers, without what is told beside it."""
        quiet = ["sh", "-c", 'exec "$@" 2>/dev/null', "sh"]
        return json.loads(
            self.servers.run(
                *quiet, "ceph", "-c", str(self.conf), "--format", "json", *words
            ).stdout
        )

    def _order(self, *words: str, check: bool = True) -> int:
        return self.servers.run(
            "ceph", "-c", str(self.conf), "--connect-timeout", "10", *words, check=check
        ).returncode
