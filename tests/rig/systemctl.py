"""A double of systemctl, for machines where no systemd runs: `enable --now acpfs@NAME`.

It starts what the unit's ExecStart says, with /etc of a directory, and returns when that says that
it is ready (sd_notify(3)), as systemctl does for a unit of `Type=notify`. It restarts nothing, and
takes the caller's PATH, as a drop-in of the unit would.

Usage: python -m tests.rig.systemctl TOP enable --now acpfs@NAME
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

READY_S = 60.0


def enable_now(top: Path, instance: str) -> None:
    """Start the unit of that instance, and wait until it is ready."""
    unit = (top / "etc/systemd/system/acpfs@.service").read_text()
    assert "\nType=notify\n" in unit
    assert (top / "etc/tmpfiles.d/acpfs.conf").exists()
    (command,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    words = shlex.split(command.replace("%i", instance).replace("/etc/", f"{top}/etc/"))
    notified = top / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(notified))
        listening.settimeout(READY_S)
        subprocess.Popen(
            words, env=os.environ | {"NOTIFY_SOCKET": str(notified)}, start_new_session=True
        )
        while b"READY=1" not in listening.recv(4096).split(b"\n"):
            pass


def main() -> None:
    """As the module says."""
    top, *words = sys.argv[1:]
    enable, now, unit = words
    if (enable, now) != ("enable", "--now") or not unit.startswith("acpfs@"):
        sys.exit(f"this double does not know: {shlex.join(words)}")
    enable_now(Path(top), unit.removeprefix("acpfs@"))


if __name__ == "__main__":
    main()
