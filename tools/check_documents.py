"""Checks that documents name only what exists (links, anchors, files in the tree, modules of
bench), and that their lines are short.

Usage: python tools/check_documents.py. Prints each broken reference and long line; exit code 1 when
there is one.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+\s+(.*)$", re.MULTILINE)
IN_TREE = re.compile(r"`((?:acpfs|bench|docs|tests|tools|systemd)/[\w./@-]+)`")
BENCH_MODULE = re.compile(r"python -m (bench\.\w+)")
LINE_CHARACTERS_MAX = 200
"""One sentence per line, and a longer one has to be read twice.

Rows of tables, code and recorded results do not count.
"""
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def documents() -> list[Path]:
    """Every Markdown file that git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [
        path
        for name in sorted(set(listed.stdout.split("\n")) - {""})
        if (path := ROOT / name).exists()
    ]


def anchors(path: Path) -> set[str]:
    """The names by which a document's headings can be linked to."""
    headings = HEADING.findall(FENCE.sub("", path.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_link(path: Path, target: str) -> bool:
    """Whether a relative link leads nowhere."""
    if re.match(r"[a-z]+:", target):
        return False
    name, _, anchor = target.partition("#")
    file = (path.parent / name).resolve() if name else path
    if not file.exists():
        return True
    return bool(anchor) and file.suffix == ".md" and anchor not in anchors(file)


def broken_references(path: Path) -> list[str]:
    """What a document names that is not there."""
    text = path.read_text(encoding="utf-8")
    found = [target for target in LINK.findall(text) if broken_link(path, target)]
    found += [name for name in IN_TREE.findall(text) if not (ROOT / name.rstrip(".")).exists()]
    found += [
        name
        for name in BENCH_MODULE.findall(text)
        if not (ROOT / (name.replace(".", "/") + ".py")).exists()
    ]
    return found


def long_lines(path: Path) -> list[int]:
    """Numbers of the lines that are too long."""
    text = FENCE.sub(lambda found: "\n" * found[0].count("\n"), path.read_text(encoding="utf-8"))
    return [
        n
        for n, line in enumerate(text.split("\n"), 1)
        if len(line) > LINE_CHARACTERS_MAX and not line.startswith(("    ", "|"))
    ]


def main() -> int:
    """Check all documents."""
    broken = [
        (path.relative_to(ROOT), reference)
        for path in documents()
        for reference in broken_references(path)
    ]
    for path, reference in broken:
        print(f"{path}: {reference} does not exist")
    written = [path for path in documents() if not path.is_relative_to(ROOT / "bench" / "results")]
    long = [(path.relative_to(ROOT), number) for path in written for number in long_lines(path)]
    for path, number in long:
        print(
            f"{path}:{number}: more than {LINE_CHARACTERS_MAX} characters: one sentence per "
            "line, and a shorter one"
        )
    return 1 if broken or long else 0


if __name__ == "__main__":
    sys.exit(main())
