"""Builds a static site with search from the documents; a link that leads nowhere ends it.

Usage: python tools/site.py DIRECTORY [QUERY...]. Needs what tools/requirements-site.txt names;
`tools/site` sees to that. The documents are copied as they lie in the tree, so that their links
hold there as well. Numbers of clauses and promises (S13, T10, X1, P7) lead to what they say. With
queries, says for each which pages and sections the search shows first: its own script is asked,
which needs `node`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)#:\s]+)[^)]*\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LIST_BELOW_TEXT = re.compile(r"^(?![ *|#>-]|\d+\. )(.+)\n(?=(?:\* |\d+\. )\S)", re.MULTILINE)
HIDDEN = re.compile(r"^<!-- test: .*? -->\n", re.MULTILINE)
DEFINED = re.compile(r"\*\*([STXP]\d+)\.\*\*")
NUMBER = re.compile(r"(?<![\w*/#-])([STXP]\d+)(?![\w*-])")
SEVERAL = re.compile(r"\[((?:S\d+ ?)+)\]\([^)]*\)")
"""Behind a promise: one link to the section that has them all, as other readers of Markdown see."""
LEFT_ALONE = re.compile(r"^#.*$|^    .*$|`[^`\n]*`|!?\[[^\]]*\]\([^)]*\)", re.MULTILINE)
UNLINKED = ("CHANGELOG.md", "docs/CONTRIBUTING.md", "bench/")
HITS = 5
WEIGHTS = {
    "docs/guide/words.md": 12,
    "docs/guide/": 8,
    "docs/CALLS.md": 8,
    "docs/TROUBLESHOOTING.md": 4,
    "docs/OPERATIONS.md": 2,
    "docs/reference/": 2,
    "docs/internals/": 0.25,
    "bench/": 0.02,
    "CHANGELOG.md": 0.1,
}
"""Of pages in the search, where not 1: who looks something up wants to know what to do, before how
it is done and what was measured.
"""
NAVIGATION: list[dict[str, Any]] = [
    {"acpfs": "README.md"},
    {
        "Guide": [
            {"Begin here": "docs/guide/README.md"},
            {"Install": "docs/guide/install.md"},
            {"Mount": "docs/guide/mount.md"},
            {"Your framework": "docs/guide/frameworks.md"},
            {"Slurm": "docs/guide/slurm.md"},
            {"Kubernetes": "docs/guide/kubernetes.md"},
            {"Your first bad night": "docs/guide/first-bad-night.md"},
            {"Words": "docs/guide/words.md"},
        ]
    },
    {"Troubleshooting": "docs/TROUBLESHOOTING.md"},
    {"System calls": "docs/CALLS.md"},
    {
        "Reference": [
            {"Contents": "docs/reference/README.md"},
            {"Settings": "docs/reference/settings.md"},
            {"Commands": "docs/reference/commands.md"},
            {"Exit codes": "docs/reference/exit-codes.md"},
            {"Metrics": "docs/reference/metrics.md"},
            {"JSON": "docs/reference/json.md"},
        ]
    },
    {
        "In depth": [
            {"By subject": "docs/README.md"},
            {"Operating": "docs/OPERATIONS.md"},
            {"Training": "docs/TRAINING.md"},
            {"Scripts of MindIO": "docs/MINDIO.md"},
            {"Semantics": "docs/SEMANTICS.md"},
            {"Scale": "docs/SCALE.md"},
            {"Support": "docs/SUPPORT.md"},
            {"Formats": "docs/FORMATS.md"},
            {"Security": "SECURITY.md"},
            {"Changes": "CHANGELOG.md"},
        ]
    },
    {
        "Work on it": [
            {"Architecture": "docs/ARCHITECTURE.md"},
            {"Clauses": "docs/internals/clauses/README.md"},
            {"Conformance": "docs/CONFORMANCE.md"},
            {"Contributing": "docs/CONTRIBUTING.md"},
            {"Dependencies": "docs/DEPENDENCIES.md"},
            {"Figures": "bench/README.md"},
        ]
    },
]
"""What the menu shows; other pages are reached by links and by search."""
SETTINGS: dict[str, Any] = {
    "site_name": "acpfs",
    "use_directory_urls": False,
    "theme": {
        "name": "material",
        "font": False,
        "features": ["navigation.tabs", "navigation.top", "search.highlight", "search.suggest"],
    },
    "plugins": ["search", "offline"],
    "markdown_extensions": [
        "tables",
        "sane_lists",
        "pymdownx.superfences",
        "pymdownx.highlight",
        {"toc": {"permalink": True}},
    ],
    "validation": {
        "nav": {"omitted_files": "ignore", "not_found": "warn", "absolute_links": "warn"},
        "links": {
            "not_found": "warn",
            "anchors": "warn",
            "absolute_links": "warn",
            "unrecognized_links": "warn",
        },
    },
    "nav": NAVIGATION,
}


def documents() -> list[str]:
    """Every Markdown file that git knows or would add, and what these show or link to."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    found = {name for name in listed if name and (ROOT / name).exists()}
    found = {name for name in found if not name.startswith((".", "tests/"))}
    for name in sorted(found):
        for target in LINK.findall((ROOT / name).read_text(encoding="utf-8")):
            path = (ROOT / name).parent.joinpath(target).resolve()
            if path.is_file() and path.is_relative_to(ROOT):
                found.add(str(path.relative_to(ROOT)))
    return sorted(found)


def places_of(names: list[str]) -> dict[str, str]:
    """Number of a clause or promise → the page that has it."""
    return {
        number: name
        for name in names
        if name.startswith("docs/")
        for number in DEFINED.findall((ROOT / name).read_text(encoding="utf-8"))
    }


def weighed(text: str, name: str) -> str:
    """A page with its weight in the search, where that is not 1."""
    weight = next((of for start, of in WEIGHTS.items() if name.startswith(start)), 1)
    return text if weight == 1 else f"---\nsearch:\n  boost: {weight}\n---\n\n{text}"


def as_the_site_reads_it(text: str, name: str, places: dict[str, str]) -> str:
    """A list may follow a line of text at once in our documents, and not in the site's Markdown.

    Numbers of clauses are links there, whoever names them.
    """
    kept: list[str] = []

    def keep(text: str) -> str:
        kept.append(text)
        return f"\0{len(kept) - 1}\0"

    def link(number: str) -> str:
        page = os.path.relpath(places[number], os.path.dirname(name))
        return keep(f"[{number}]({page}#{number})")

    text = FENCE.sub(lambda found: keep(found[0]), HIDDEN.sub("", text))
    text = LIST_BELOW_TEXT.sub(r"\1\n\n", text)
    if not name.startswith(UNLINKED):
        text = SEVERAL.sub(lambda found: found[1], text)
        text = LEFT_ALONE.sub(lambda found: keep(found[0]), text)
        text = NUMBER.sub(lambda found: link(found[1]) if found[1] in places else found[0], text)
    text = DEFINED.sub(r'<a id="\1"></a>\g<0>', text)
    while "\0" in text:  # what was kept may have something that was kept
        text = re.sub(r"\0(\d+)\0", lambda found: kept[int(found[1])], text)
    return text


def build(target: Path) -> None:
    """Bring the site to a directory.

    Raises:
        CalledProcessError: a page cannot be made, or a link leads nowhere; the output says which.
    """
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        names = documents()
        places = places_of([name for name in names if name.endswith(".md")])
        for name in names:
            place = scratch / "pages" / name
            place.parent.mkdir(parents=True, exist_ok=True)
            if name.endswith(".md"):
                text = (ROOT / name).read_text(encoding="utf-8")
                shown = weighed(as_the_site_reads_it(text, name, places), name)
                place.write_text(shown, encoding="utf-8")
            else:
                shutil.copy(ROOT / name, place)
        settings = {**SETTINGS, "docs_dir": "pages", "site_dir": "site"}
        # YAML has all of JSON
        (scratch / "mkdocs.yml").write_text(json.dumps(settings), encoding="utf-8")
        subprocess.run(
            [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"],
            cwd=scratch,
            env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
            check=True,
        )
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(scratch / "site", target)


def found_by(site: Path, queries: list[str]) -> list[list[str]]:
    """What the site's own search shows for each: addresses, the best first; of each page the
    section that fits best.

    Raises:
        CalledProcessError, FileNotFoundError: there is no `node`, or it cannot run that script.
    """
    words = ["node", str(ROOT / "tools/site_search.js"), str(site), *queries]
    said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    return [[page[0] for page in json.loads(line)][:HITS] for line in said.splitlines()]


def main(target: Path, queries: list[str]) -> None:
    """Build, and look the queries up."""
    build(target)
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    print(f"{target}: {len(list(target.rglob('*.html')))} pages, {size / (1 << 20):.1f} MiB")
    for query, found in zip(queries, found_by(target, queries) if queries else [], strict=True):
        print(query, *found, sep="\n    ")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
