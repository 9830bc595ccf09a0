"""docs/FORMATS.md has every form that the code reads or writes, with its version."""

from __future__ import annotations

import ast
import json
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from acpfs import __version__
from tests.formats.fixture_files import FIXTURES
from tests.formats.leave import ALL
from tests.formats.row_fixtures import FIXTURES_OF, Kept
from tests.formats.rows import ROWS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/FORMATS.md").read_text(encoding="utf-8")
FORMS = {"json", "pickle", "sqlite3", "tomllib", "tomli"}
"""Who imports one of them has a form."""
MODULES = {
    path.relative_to(ROOT / "acpfs").with_suffix("").as_posix().replace("/", "."): path
    for path in sorted((ROOT / "acpfs").rglob("*.py"))
}


def versions(path: Path) -> dict[str, object]:
    """Constants of a module that end in VERSION."""
    found: dict[str, object] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            if not isinstance(node.value.value, int | float):
                continue  # SAVE_VERSION is a statement
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id.endswith("VERSION"):
                    found[target.id] = node.value.value
    return found


def imports(path: Path) -> set[str]:
    """Top-level names of what a module imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.clause("S528")
def test_every_version_constant_is_on_the_page_with_its_value() -> None:
    wanted = {
        f"`{module}.{name}` = {value}"
        for module, path in MODULES.items()
        for name, value in versions(path).items()
    }
    assert len(wanted) > 5
    assert sorted(text for text in wanted if text not in PAGE) == []
    named = set(re.findall(r"`[\w.]+\.\w*VERSION` = [\d.]+\d|`[\w.]+\.\w*VERSION` = \d", PAGE))
    assert sorted(named - wanted) == [], "named, and not in the code"


@pytest.mark.clause("S528")
def test_every_module_that_has_a_form_is_on_the_page() -> None:
    named = {f"`{module}`" for module, path in MODULES.items() if imports(path) & FORMS}
    assert len(named) > 40
    assert sorted(module for module in named if module not in PAGE) == []


def test_every_module_on_the_page_is_there() -> None:
    rows = "\n".join(line for line in PAGE.splitlines() if line.startswith("|"))
    named = set(re.findall(r"`([a-z_]+(?:\.\w+)+)`", rows))
    packages = {module.partition(".")[0] for module in MODULES}
    files = {
        "meta.json",
        "facts.json",
        "gasp.json",
        "salvaged.json",
        "faults.jsonl",
        "state.sqlite",
    }
    strange = {
        name
        for name in named - files
        if name.partition(".")[0] in packages
        and name not in MODULES
        and name.rpartition(".")[0] not in MODULES
    }
    assert strange == set()


def rows_of_the_page() -> dict[str, list[str]]:
    """What each row of a table is about → its cells."""
    found: dict[str, list[str]] = {}
    lines = PAGE.splitlines()
    for before, line in zip(["", *lines], lines, strict=False):
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if not cells or set(line) <= set("|- ") or cells[0] == "what":
            continue
        assert before.startswith("|"), f"no header above it: {line[:60]}"
        found[cells[0].partition(": ")[0]] = cells
    return found


def functions(module: str) -> set[str]:
    """Tests of a module below `tests`."""
    text = (ROOT / f"tests/{module}.py").read_text(encoding="utf-8")
    return set(re.findall(r"^ *def (test_\w+)", text, re.MULTILINE))


@pytest.mark.clause("S512")
def test_every_line_of_the_page_has_tests_of_an_older_and_of_a_newer_form() -> None:
    found = rows_of_the_page()
    assert len(found) > 40
    assert sorted(found.keys() ^ ROWS.keys()) == []
    for name, row in ROWS.items():
        assert bool(row.why) is not bool(row.older and row.newer), name
        for test in (*row.older, *row.newer):
            module, _colons, function = test.partition("::")
            assert function in functions(module), f"{name}: {test}"


@pytest.mark.clause("S512")
def test_what_has_a_version_has_a_test_that_a_newer_one_is_refused() -> None:
    """A form without one may say why nobody reads it; one with a version is read by somebody."""
    cells = rows_of_the_page()
    with_version = [name for name in ROWS if "VERSION" in cells[name][2]]
    assert len(with_version) > 8
    assert [name for name in with_version if ROWS[name].why] == ["checkpoints"], (
        "torch's, Megatron's"
    )


def names_in(case: Path) -> set[str]:
    """What a fixture has: names of files, and `NAME#XATTR`."""
    if not (case / "files.json").exists():
        return {path.name for path in case.iterdir()}
    found: dict[str, dict[str, Any]] = json.loads((case / "files.json").read_text())
    return {
        name if attribute is None else f"{name}#{attribute}"
        for name, kept in found.items()
        for attribute in (None, *kept.get("xattrs", {}))
    }


@pytest.mark.clause("S564")
def test_every_line_of_the_page_has_a_fixture_or_says_why_not() -> None:
    """Of the version that was cut last; and who reads it is among the tests of the line."""
    assert sorted(rows_of_the_page().keys() ^ FIXTURES_OF.keys()) == []
    kept = {name: one for name, one in FIXTURES_OF.items() if isinstance(one, Kept)}
    assert len(kept) > 20
    for name, one in kept.items():
        names = names_in(FIXTURES / __version__ / one.case)
        assert any(fnmatchcase(found, one.name) for found in names), f"{name}: {one.name}"
        module, _colons, function = one.test.partition("::")
        assert function in functions(module), f"{name}: {one.test}"
        assert one.test in ROWS[name].older, f"{name}: it is no test of an older form"
    assert all(isinstance(one, Kept) or len(one) > 10 for one in FIXTURES_OF.values())


@pytest.mark.clause("S513", "S530")
def test_what_this_version_leaves_is_kept_for_later_ones() -> None:
    """`tools/release --cut VERSION` makes it, so that the next one's tests have it."""
    found = {path.name for path in (FIXTURES / __version__).iterdir()}
    assert found == set(ALL)
