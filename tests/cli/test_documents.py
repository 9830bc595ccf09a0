"""docs/OPERATIONS.md, docs/DEPENDENCIES.md and docs/ARCHITECTURE.md say what the code says."""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from acpfs.cli.main import COMMANDS
from acpfs.config import CHANGEABLE
from acpfs.control.verb_table import VERBS
from acpfs.worker.setting_changes import CHANGES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
OPERATIONS = (ROOT / "docs/OPERATIONS.md").read_text(encoding="utf-8")
SEMANTICS = (ROOT / "docs/SEMANTICS.md").read_text(encoding="utf-8")
PROMISES = [int(number) for number in re.findall(r"^\*\*P(\d+)\.\*\*", SEMANTICS, re.MULTILINE)]
EXCEPTION = re.compile(r"^\| \*\*(X\d+)\.\*\*", re.MULTILINE)
CLAUSE_PAGES = sorted((ROOT / "docs/internals/clauses").glob("*.md"))
CLAUSES_BEHIND = re.compile(r"\[((?:S\d+ ?)+)\]\(internals/clauses/([\w-]+\.md)#([\w-]+)\)")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DEPENDENCIES = (ROOT / "docs/DEPENDENCIES.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs/ARCHITECTURE.md").read_text(encoding="utf-8")


def clauses() -> dict[str, str]:
    """Each clause and where it is: page#section."""
    found: dict[str, str] = {}
    for page in CLAUSE_PAGES:
        section = ""
        for line in page.read_text(encoding="utf-8").splitlines():
            if line.startswith("## "):
                section = re.sub(r"[^\w\- ]", "", line[3:].lower()).replace(" ", "-")
            elif number := re.match(r"\*\*([ST]\d+)\.\*\*", line):
                found[number[1]] = f"{page.name}#{section}"
    return found


@pytest.mark.parametrize("name", [f"acpfs {command}" for command in COMMANDS])
def test_every_command_is_in_a_table(name: str) -> None:
    assert re.search(rf"^\| `{name}\b", OPERATIONS, re.MULTILINE)


def test_what_can_be_changed_in_use_is_named_where_users_look() -> None:
    assert sorted(CHANGES) == sorted(CHANGEABLE)
    assert re.findall(r"`(\w+)`", VERBS["set"].does) == [
        name.removesuffix("_s") for name in CHANGEABLE
    ]


@pytest.mark.parametrize(
    "page", ["CALLS.md", "TROUBLESHOOTING.md", "OPERATIONS.md", "TRAINING.md", "MINDIO.md"]
)
def test_clauses_that_other_pages_cite_are_there(page: str) -> None:
    """Somebody who follows a number finds what it says."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    cited = set(re.findall(r"\b[STX]\d+\b", text))
    assert cited
    assert sorted(cited - clauses().keys() - set(EXCEPTION.findall(SEMANTICS))) == []


def test_what_everybody_reads_fits_into_an_evening() -> None:
    assert len(SEMANTICS.split()) <= 6000
    assert len((ROOT / "docs/TRAINING.md").read_text(encoding="utf-8").split()) <= 5000
    assert len(PROMISES) <= 65


def test_promises_are_numbered_one_after_the_other() -> None:
    assert list(range(1, len(PROMISES) + 1)) == PROMISES
    named = {int(number) for number in re.findall(r"\bP(\d+)\b", SEMANTICS)}
    assert sorted(named - set(PROMISES)) == []


def test_each_clause_is_behind_the_link_of_a_promise() -> None:
    """Whoever looks a number up in SEMANTICS comes to the section that has the clause.

    A new clause: add its number to the link of the promise that it belongs to.
    """
    places = clauses()
    linked = {
        number: f"{page}#{section}"
        for numbers, page, section in CLAUSES_BEHIND.findall(SEMANTICS)
        for number in numbers.split()
    }
    ours = {number for number in places if number.startswith("S")}
    assert sorted(ours - linked.keys()) == []
    assert {number: where for number, where in linked.items() if places[number] != where} == {}


WORDS_MAX = 6000
"""Of both pages of the contract: that by subject, and the table by system call."""


@pytest.mark.clause("S569")
def test_the_contract_is_short() -> None:
    """Numbers of clauses and links count, bars of tables do not."""
    pages = (ROOT / "docs" / name for name in ("SEMANTICS.md", "CALLS.md"))
    words = [one for page in pages for one in page.read_text().split() if re.search(r"\w", one)]
    assert len(words) <= WORDS_MAX


def test_each_page_of_clauses_says_what_it_is_about() -> None:
    for page in CLAUSE_PAGES:
        title, _, rest = page.read_text(encoding="utf-8").partition("\n\n")
        assert title.startswith("# Clauses: "), page
        assert rest[0] not in "#*", page
        if page.name != "README.md":
            assert f"]({page.name})" in (page.parent / "README.md").read_text(encoding="utf-8")


OPTIONAL = {
    "pyfuse3",
    "torch",
    "cryptography",
    "isal",
    "matplotlib",
    "textual",
    "accelerate",
    "transformers",
    "lightning",
    "megatron",
}
"""Extras: `plot` is imported where a picture is asked for, and one line where it is not there;
`torch` in ranks only (acpfs.training).

The others are what a script has that imports their adapter (acpfs.training.frameworks); they are no
extras.
"""


def dependencies() -> set[str]:
    return {re.split(r"[\[><=; ]", dependency)[0] for dependency in PROJECT["dependencies"]}


def imported() -> set[str]:
    """Top-level modules that acpfs imports, anywhere, and that are neither its own nor Python's."""
    found = set()
    for path in (ROOT / "acpfs").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found - {"acpfs", "tomllib"} - sys.stdlib_module_names


def test_what_is_imported_is_a_dependency_and_the_other_way_round() -> None:
    assert imported() == dependencies() | OPTIONAL


def test_every_dependency_has_its_reason() -> None:
    project = PROJECT
    named = dependencies()
    assert (
        set(re.findall(r"^\| (\S+) \| [^|]+ \| [^|]+ \| [^|]+ \|$", DEPENDENCIES, re.MULTILINE))
        - {"package"}
        == named
    )
    assert set(re.findall(r"^\| `(\w+)` \|", DEPENDENCIES, re.MULTILINE)) == set(
        project["optional-dependencies"]
    )


def test_every_module_is_named_in_the_architecture() -> None:
    """By its own name, or by that of the package inside a layer in which it lies."""
    named = set(re.findall(r"`([\w.]+)`", ARCHITECTURE))
    modules = [
        path.relative_to(ROOT / "acpfs")
        for path in (ROOT / "acpfs").rglob("*.py")
        if path.name != "__init__.py"
    ]
    assert [
        str(path)
        for path in modules
        if path.stem not in named and not {part.name for part in path.parents[:-2]} & named
    ] == []


def test_numbers_are_links_on_the_site() -> None:
    spec = importlib.util.spec_from_file_location("documents_site", ROOT / "tools/site.py")
    assert spec is not None
    assert spec.loader is not None
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    places = {"S1": "docs/internals/clauses/a.md", "S12": "docs/internals/clauses/b.md"}
    source = (
        "# S1\n\n**S12.** As S1, not S2, `S1`, A-S1 or [as S1](x.md).\n\n"
        "→ [S1 S12](clauses/a.md#b).\n\n```\nS1\n```\n\n    S1\n\n| S12 |\n"
    )
    assert site.as_the_site_reads_it(source, "docs/internals/clauses/b.md", places) == (
        '# S1\n\n<a id="S12"></a>**S12.** As [S1](a.md#S1), '
        "not S2, `S1`, A-S1 or [as S1](x.md).\n\n"
        "→ [S1](a.md#S1) [S12](b.md#S12).\n\n```\nS1\n```\n\n    S1\n\n| [S12](b.md#S12) |\n"
    )
    assert site.as_the_site_reads_it("S1\n", "bench/README.md", places) == "S1\n"
