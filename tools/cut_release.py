"""Gives this tree a version: all that has to change for a release, in one step, to be looked at.

    tools/release --cut VERSION       in the environment for development, as root (it mounts)

It writes the version, the changelog's section, examples in documents, the manual, the reference,
what programs may rely on (`tests/formats/contract.json`), and what this version leaves when it is
killed (`tests/formats/fixtures/VERSION`), which every later one has to read. It commits nothing:
look at the difference, commit it, tag it `vVERSION`, and call `tools/release`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

from release import ReleaseError, run, version_of

ROOT = Path(__file__).parents[1]
VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:(a|b|rc)(\d+))?")
"""What PEP 440 has, without what acpfs has no use for."""
UNRELEASED = "## Unreleased\n"
NOTHING_YET = "Nothing yet.\n"
WITH_EXAMPLES = ("docs/OPERATIONS.md", "docs/guide/install.md", "docs/guide/kubernetes.md")
"""Documents that name files, images or output with the version in it."""
STEPS = (
    ("tools/write_man.py",),
    ("tools/write_reference.py",),
    ("-m", "tests.formats.contract"),
)
Key = tuple[int, int, int, str, int]


def key_of(version: str) -> Key:
    """For the order of versions: a candidate comes before its release.

    Raises:
        ReleaseError: it is none.
    """
    found = VERSION.fullmatch(version)
    if found is None:
        raise ReleaseError(f"{version} is no version such as 1.2.0 or 1.2.0rc1")
    stage = found[4] or "~"  # behind a, b and rc
    return int(found[1]), int(found[2]), int(found[3]), stage, int(found[5] or 0)


def with_section(changelog: str, version: str, day: str, candidate: str | None = None) -> str:
    """The changelog in which what is unreleased is this version's.

    `candidate`: the version before, if it is a candidate of this one: its section becomes this
    version's, behind what came since, which may be nothing.

    Raises:
        ReleaseError: nothing is unreleased, or it has that section.
    """
    if re.search(rf"^## {re.escape(version)}\b", changelog, re.MULTILINE):
        raise ReleaseError(f"CHANGELOG.md has a section {version}")
    before, heading, after = changelog.partition(UNRELEASED)
    section = re.split(r"^## ", after, maxsplit=1, flags=re.MULTILINE)[0].strip()
    is_empty = section in ("", NOTHING_YET.strip())
    if not heading or (is_empty and candidate is None):
        raise ReleaseError("CHANGELOG.md has nothing under Unreleased")
    title = f"## {version} ({day})\n"
    if candidate is not None:
        _unreleased, found, of_candidate = after.partition(f"## {candidate} ")
        if not found:
            raise ReleaseError(f"CHANGELOG.md has no section {candidate}")
        _day, _newline, told = of_candidate.partition("\n")
        after = f"{told}" if is_empty else f"\n{section}\n{told}"
    return f"{before}{UNRELEASED}\n{NOTHING_YET}\n{title}{after}"


def with_examples(text: str, old: str, new: str) -> str:
    """Text in which names of acpfs's files and images, and what it prints, have the new version."""
    return re.sub(rf"\b(acpfs[-: ]){re.escape(old)}\b", rf"\g<1>{new}", text)


def rewrite(name: str, text: str) -> None:
    """A file of the tree."""
    (ROOT / name).write_text(text, encoding="utf-8")


def text_of(name: str) -> str:
    """A file of the tree."""
    return (ROOT / name).read_text(encoding="utf-8")


def cut(version: str) -> None:
    """Write it all.

    Raises:
        ReleaseError: it cannot be; nothing was written.
    """
    old = version_of(ROOT)
    if key_of(version) <= key_of(old):
        raise ReleaseError(f"{version} is not newer than {old}")
    if run("git", "status", "--porcelain"):
        raise ReleaseError("the working tree is not clean")
    day = datetime.fromtimestamp(int(run("git", "log", "-1", "--format=%ct")), timezone.utc)
    is_candidates = key_of(version)[:3] == key_of(old)[:3]
    candidate = old if is_candidates else None
    changelog = with_section(text_of("CHANGELOG.md"), version, f"{day:%Y-%m-%d}", candidate)
    rewrite("CHANGELOG.md", changelog)
    module = "acpfs/__init__.py"
    rewrite(module, text_of(module).replace(f'"{old}"', f'"{version}"'))
    for name in WITH_EXAMPLES:
        rewrite(name, with_examples(text_of(name), old, version))
    for step in (*STEPS, ("-m", "tests.formats.leave", version)):
        run(sys.executable, *step, PYTHONPATH=str(ROOT))


def main() -> int:
    """Cut it, and say what is left to do."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise ReleaseError("one version is wanted: tools/release --cut VERSION")
    version = sys.argv[1]
    cut(version)
    subprocess.run(["git", "status", "--short"], cwd=ROOT, check=True)
    print(
        f"now: look at it, git commit, git tag -s v{version}, tools/release\n"
        "(`git checkout . && git clean -fd tests/formats/fixtures` takes all of it back)"
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ReleaseError as error:
        sys.exit(f"not cut: {error}")
