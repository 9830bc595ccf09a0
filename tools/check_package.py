"""What a user would get from a wheel: the commands, the types marker, nothing that is not acpfs's.

`tools/release` asks it of each wheel that it builds. Or: python tools/check_package.py WHEEL.
"""

from __future__ import annotations

import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMANDS = {
    "acpfs",
    "acpfs-ctl",
    "acpfs-run",
    "acpfs-train",
    "mount.acpfs",
    "umount.fuse.acpfs",
}
TEMPLATES = [
    str(path.relative_to(ROOT))
    for path in sorted((ROOT / "acpfs/deploy").rglob("*"))
    if path.is_file()
]


def scripts_of(wheel: Path) -> dict[str, str]:
    """Commands, and what each starts."""
    with zipfile.ZipFile(wheel) as archive:
        (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        parser = ConfigParser(delimiters=("=",))
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read_string(archive.read(entry_points).decode())
    return dict(parser["console_scripts"])


def problems_of(wheel: Path) -> list[str]:
    """What is wrong with it."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    problems = [
        f"{name} does not belong into the wheel"
        for name in names
        if not name.startswith(("acpfs/", "acpfs-"))
    ]
    problems += [f"{path} is missing" for path in TEMPLATES if path not in names]
    problems += ["acpfs/py.typed is missing"] * ("acpfs/py.typed" not in names)
    scripts = scripts_of(wheel)
    problems += [f"no command {name}" for name in sorted(COMMANDS - scripts.keys())]
    for target in scripts.values():
        module, _, function = target.partition(":")
        place = ROOT / f"{module.replace('.', '/')}.py"
        if not place.exists() or f"def {function}(" not in place.read_text(encoding="utf-8"):
            problems.append(f"{target} cannot be called")
    return problems


if __name__ == "__main__":
    found = problems_of(Path(sys.argv[1]))
    print("\n".join(found) or f"whole: {', '.join(sorted(scripts_of(Path(sys.argv[1]))))}")
    sys.exit(bool(found))
