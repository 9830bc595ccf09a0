"""Hosts with a network of their own: a network namespace for each node, on one bridge, whose cables
can be pulled.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType

CLONE_NEWNET = 0x40000000
PREFIX = "10.78.0"


class Networks:
    """A context manager. Node n has the address 10.78.0.(n + 1)."""

    def __init__(self, nodes: int) -> None:
        marker = f"{os.getpid() % 100000}"
        self.bridge = f"acb{marker}"
        self.names = [f"acpfs-node-{marker}-{number}" for number in range(nodes)]
        self.device = f"acn{marker}"
        """In each node."""
        self._plugs = [f"acp{marker}-{number}" for number in range(nodes)]

    @staticmethod
    def missing() -> str:
        """Why there can be none; empty: there can."""
        return "needs root" if os.geteuid() else "" if shutil.which("ip") else "needs ip(8)"

    def __enter__(self) -> Networks:
        try:
            self._ip("link", "add", self.bridge, "type", "bridge")
            self._ip("link", "set", self.bridge, "up")
            for number, (name, plug) in enumerate(zip(self.names, self._plugs, strict=True)):
                self._ip("netns", "add", name)
                self._ip(
                    "link", "add", plug, "type", "veth", "peer", "name", self.device, "netns", name
                )
                self._ip("link", "set", plug, "master", self.bridge, "up")
                self._ip(
                    "-n", name, "addr", "add", f"{self.address(number)}/24", "dev", self.device
                )
                for device in ("lo", self.device):
                    self._ip("-n", name, "link", "set", device, "up")
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    def remove(self) -> None:
        """Whatever of it is there.

        The cables by themselves: a network goes with the last process that is in it, and the kernel
        takes its time.
        """
        links = [["link", "del", plug] for plug in self._plugs]
        spaces = [["netns", "del", name] for name in self.names]
        for words in (*links, *spaces, ["link", "del", self.bridge]):
            subprocess.run(["ip", *words], capture_output=True, check=False, timeout=60)

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *words], capture_output=True, check=True, timeout=60)

    @staticmethod
    def address(number: int) -> str:
        return f"{PREFIX}.{number + 1}"

    def enter(self, number: int) -> None:
        """This thread, and what it starts, is on that node from here on."""
        with open(Path("/run/netns") / self.names[number], "rb") as namespace:
            library = ctypes.CDLL(None, use_errno=True)
            if library.setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"{self.names[number]} cannot be entered")

    def cut(self, number: int) -> None:
        """Nothing comes in or goes out; nobody is told."""
        self._ip("link", "set", self._plugs[number], "down")

    def join(self, number: int) -> None:
        """It is plugged in again."""
        self._ip("link", "set", self._plugs[number], "up")
