"""A keeper, and whoever starts daemons again, for tests: processes that no kill of a mount
reaches.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from acpfs.descriptors import readable
from acpfs.supervisor import keeper_client
from tests.rig.mounts import ENVIRONMENTS, REPOSITORY, AcpfsMount


def until(condition: Callable[[], bool]) -> None:
    """Wait for what nobody announces."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)


class KeeperProcess:
    """`acpfs keeper` of one runtime directory; the mount's own kill does not reach it, as another
    container's would not.
    """

    def __init__(self, runtime: Path) -> None:
        self.runtime = runtime
        runtime.mkdir(mode=0o755, exist_ok=True)
        self._start()

    def _start(self) -> None:
        environment = {
            name: value for name, value in os.environ.items() if name != "ACPFS_RUNTIME_DIR"
        } | {"PYTHONPATH": str(REPOSITORY)}
        words = ["-m", "acpfs.cli.main", "keeper", "--runtime-dir", str(self.runtime)]
        self.process = subprocess.Popen(
            [sys.executable, *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        assert self.process.stderr is not None
        assert b"holds the mounts of" in self.process.stderr.readline()

    def restart(self) -> None:
        """SIGKILL, and another one."""
        self.end()
        self._start()

    def held(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] | None = None

        def answers() -> bool:  # not in the time that it is given, where the machine stands still
            nonlocal found
            found = keeper_client.held(self.runtime / keeper_client.SOCKET)
            return found is not None

        until(answers)
        assert found is not None
        return found

    def phase(self) -> str:
        held = self.held()
        return str(held[0]["phase"]) if held else ""

    def end(self) -> None:
        self.process.kill()
        self.process.wait(60)
        assert self.process.stderr is not None
        self.process.stderr.close()


class Launcher:
    """Starts daemons, as a kubelet does: a process that has nothing open in the mount.

    A process that has would wait for the daemon before it could start it: its child closes copies
    of what is open, and that is a call.
    """

    PROGRAM = """
import json, subprocess, sys
for line in sys.stdin:
    order = json.loads(line)
    with open(order["log"], "ab") as log:
        streams = dict(stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        done = subprocess.run(order["words"], env=order["env"], **streams)
    print(done.returncode, flush=True)
"""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", self.PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def mount(self, mount: AcpfsMount, *words: str) -> int:
        """`acpfs mount`, once more; its exit code."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        program = (
            "import sys; from acpfs.cli.main import main; sys.argv[0] = 'acpfs'; sys.exit(main())"
        )
        options = [
            word
            for name, value in mount.options.items()
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        command = [
            "mount",
            str(mount.backing),
            str(mount.path),
            "--transport",
            mount.transport.partition("-")[0],
            *options,
            *words,
        ]
        environment = {
            **os.environ,
            **ENVIRONMENTS[mount.transport],
            "ACPFS_RUNTIME_DIR": str(mount.runtime_dir),
            "PYTHONPATH": str(REPOSITORY),
        }
        order = {
            "words": [sys.executable, "-c", program, *command],
            "env": environment,
            "log": str(mount.log),
        }
        print(json.dumps(order), file=self._process.stdin, flush=True)
        assert readable(self._process.stdout.fileno(), 120)
        return int(self._process.stdout.readline())

    def end(self) -> None:
        with self._process:
            self._process.kill()
