"""Builds the wheel and checks what a user would get: the commands, the types marker, nothing that
is not acpfs's.

Usage: python tools/check_package.py EMPTY_DIRECTORY.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMANDS = {"acpfs", "acpfs-ctl", "acpfs-train", "mount.acpfs"}
TEMPLATES = [
    str(path.relative_to(ROOT))
    for path in sorted((ROOT / "acpfs/deploy").rglob("*"))
    if path.is_file()
]


def main(directory: Path) -> int:
    """Build, look inside, import what the commands start."""
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "-w",
            str(directory),
            str(ROOT),
        ],
        check=True,
    )
    (wheel,) = directory.glob("acpfs-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
        parser = ConfigParser(delimiters=("=",))
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read_string(archive.read(entry_points).decode())
    problems = [
        f"{name} does not belong into the wheel"
        for name in names
        if not name.startswith(("acpfs/", "acpfs-"))
    ]
    problems += [f"{path} is missing" for path in TEMPLATES if path not in names]
    problems += ["acpfs/py.typed is missing"] * ("acpfs/py.typed" not in names)
    scripts = dict(parser["console_scripts"])
    problems += [f"no command {name}" for name in sorted(COMMANDS - scripts.keys())]
    for target in scripts.values():
        module, _, function = target.partition(":")
        if not callable(getattr(importlib.import_module(module), function, None)):
            problems.append(f"{target} cannot be called")
    print(
        "\n".join(problems)
        or f"{wheel.name}: {len(names)} files, commands {', '.join(sorted(scripts))}"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
