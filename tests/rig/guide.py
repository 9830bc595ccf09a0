"""Blocks of commands in documents, and what runs them.

Above each block of a page of the guide stands how a test treats it:
`<!-- test: HOW -->` or `<!-- test: HOW, why -->`. `HOW` is one of `KINDS`.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.rig.mounts import REPOSITORY

GUIDE = REPOSITORY / "docs/guide"
KINDS = {
    "run": "in the page's own shell",
    "user": "as a user without root",
    "mounted": "over a mount, which is made if there is none",
    "killed": "after all processes of the mount were killed",
    "interrupted": "after a program was killed in the middle of half.pt",
    "stored": "when something is on the storage",
    "torch": "Python, all blocks of the page one after the other, in a mount",
    "after torch": "over the same mount, behind the Python",
    "manifests": "and what it makes is compared with the schemas of Kubernetes",
    "systemd": "as root, where a double of systemctl starts what the unit says",
    "pod": "YAML, compared with them",
    "read": "only parsed; it says why",
}
_BLOCK = re.compile(
    r"(?:^<!-- test: (?P<how>[a-z ]+?)(?:, (?P<why>[^\n]+))? -->\n)?"
    r"^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
COMMAND_S = 240.0
PROGRAMS = {"acpfs": "acpfs.cli.main", "acpfs-ctl": "acpfs.cli.ctl"}
SMALL = "--prefault 0 --ram 256M"
"""Before the options of each `acpfs mount`, so that a machine that runs tests keeps its memory."""


@dataclass(frozen=True)
class Block:
    """Commands, or a program, between two fences of a page."""

    page: str
    line: int
    language: str
    how: str | None
    """None: nothing stands above it."""
    why: str | None
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """The pages of the guide."""
    return sorted(GUIDE.glob("*.md"))


def blocks(page: Path) -> list[Block]:
    """Those of one page, from the top."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page.name,
            text.count("\n", 0, found.start("text")),
            found["language"],
            found["how"],
            found["why"],
            found["text"],
        )
        for found in _BLOCK.finditer(text)
    ]


class Reader:
    """Somebody who reads a page and types what it says, on a machine of his own below `top`.

    `/shared/ckpt`, `/mnt/acp` and `/etc` of the pages lie there, and so does his home.
    """

    def __init__(self, top: Path, runtime_dir: Path) -> None:
        self.top = top
        self.storage = top / "storage"
        self.mountpoint = top / "mnt"
        self.home = top / "home"
        self.desk = top / "desk"
        """Where the shell is."""
        self._runtime_dir = runtime_dir
        for made in (self.storage, self.home, self.desk, top / "etc", top / "bin"):
            made.mkdir(parents=True)
        for name, module in PROGRAMS.items():
            self._program(name, module)

    def _program(self, name: str, module: str) -> None:
        small = f'[ "$1" != mount ] || {{ shift; set -- mount {SMALL} "$@"; }}\n'
        path = self.top / "bin" / name
        path.write_text(
            f"#!/bin/sh\n{small if name == 'acpfs' else ''}"
            f'exec {shlex.quote(sys.executable)} -m {module} "$@"\n'
        )
        path.chmod(0o755)

    def with_systemd(self) -> None:
        """A checkout is here, and systemd's directories are, but systemd is not."""
        (self.desk / "systemd").symlink_to(REPOSITORY / "systemd")
        for made in ("systemd/system", "tmpfiles.d"):
            (self.top / "etc" / made).mkdir(parents=True)
        path = self.top / "bin" / "systemctl"
        path.write_text(
            f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -m tests.rig.systemctl"
            f' {shlex.quote(str(self.top))} "$@"\n'
        )
        path.chmod(0o755)

    def translated(self, text: str) -> str:
        """Paths of the pages → those of this machine."""
        text = re.sub(r"/shared/ckpt\b", str(self.storage), text)
        text = re.sub(r"/mnt/acp\b", str(self.mountpoint), text)
        return re.sub(r"(?<!\S)/etc/(?=slurm|systemd|tmpfiles\.d|acpfs)", f"{self.top}/etc/", text)

    def environment(self) -> dict[str, str]:
        """Of his shell."""
        return {
            **os.environ,
            "PATH": f"{self.top}/bin:{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY),
            "HOME": str(self.home),
            "ACPFS_RUNTIME_DIR": str(self._runtime_dir),
            "COLUMNS": "80",
        }

    def types(self, block: Block, *, before: tuple[str, ...] = (), **more: str) -> str:
        """One block, in a shell that ends at the first command that fails.

        `before`: what the shell is started by. Output goes through a file: a daemon may keep a
        pipe open.
        """
        script = self.desk / f"line-{block.line}.sh"
        said = self.desk / f"line-{block.line}.out"
        script.write_text(f"set -euo pipefail\n{self.translated(block.text)}")
        with said.open("w") as out:
            done = subprocess.run(
                [*before, "bash", str(script)],
                cwd=self.desk,
                env=self.environment() | more,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=COMMAND_S,
                check=False,
            )
        text = said.read_text(errors="replace")
        assert done.returncode == 0, f"{block.place}: exit code {done.returncode}\n{text}"
        return text
