"""What a mount costs before it does anything: each process imports what it needs, and nothing else.

Every mount pays for each of these, and a test run makes a thousand mounts. Modules are looked at
instead of seconds, which depend on what else the machine does.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from acpfs.supervisor import supervisor

FOR_PEOPLE = frozenset(
    {
        "click",
        "rich",
        "pygments",
        "asyncio",
        "http.server",
        "prometheus_client",
        "structlog",
        "pyfuse3",
        "pydantic",
    }
)
OF_WORKERS = frozenset(
    {
        "trio",
        "sqlite3",
        "xxhash",
        "prometheus_client",
        "structlog",
        "rich",
        "asyncio",
        "ssl",
        "pyfuse3",
        "pydantic",
    }
)


def imported_by(code: str) -> set[str]:
    code += "\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("code", "too_much"),
    [
        ("from acpfs.worker import template\ntemplate.import_all()", FOR_PEOPLE),
        ("import acpfs.cli.main, acpfs.cli.mount\nfrom acpfs.mounting import starting", OF_WORKERS),
        ("import acpfs.cli.main, acpfs.cli.umount", OF_WORKERS | {"attr"}),
        ("import acpfs.cli.ctl, acpfs.cli.verbs.status", OF_WORKERS | {"attr"}),
        (
            "import acpfs.supervisor.supervisor",
            OF_WORKERS | FOR_PEOPLE | {"attr", "typing_extensions"},
        ),
    ],
    ids=["template", "mount", "umount", "status", "supervisor"],
)
def test_a_process_imports_what_it_needs_and_no_more(code: str, too_much: frozenset[str]) -> None:
    assert imported_by(code) & too_much == set()


def test_the_supervisor_needs_the_standard_library_only() -> None:
    """What has to outlive everything else depends on nothing that an upgrade of packages may
    break.
    """
    modules = ", ".join(
        f"acpfs.supervisor.{path.stem}"
        for path in Path(supervisor.__file__).parent.glob("[a-z]*.py")
    )
    found = {name.split(".")[0] for name in imported_by(f"import {modules}")}
    assert {
        name
        for name in found - sys.stdlib_module_names
        if name not in {"acpfs", "__mp_main__"} and not name.startswith("_")
    } == set()
    late = {
        name.split(".")[0]
        for path in Path(supervisor.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in _imported(node)
    }
    assert late - sys.stdlib_module_names == {"acpfs"}, "also where it is imported late"


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
