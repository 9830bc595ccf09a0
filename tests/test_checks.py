"""The checks of the tree as tests, so that one runner does all: format, lint, types, shell,
documents, package, the demonstration.

`tools/test NAME` runs one of them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PYTHON = sys.executable
SCRIPTS = (
    "tools/test",
    "tools/quickstart",
    "tools/site",
    "tools/bundle",
    "tools/release",
    "tools/environment.sh",
    ".ci/run",
)
DEMONSTRATION_BYTES = 128 << 20
TIMEOUT_S = 1500
CHECKS = {
    "types": [PYTHON, "-m", "mypy", "--strict", "acpfs", "bench", "tools", "tests"],
    "format": [PYTHON, "-m", "ruff", "format", "--check", "."],
    "lint": [PYTHON, "-m", "ruff", "check", "."],
    "documents": [PYTHON, "tools/check_documents.py"],
}


def ended(command: list[str], cwd: str = str(REPOSITORY), **environment: str) -> str:
    """What a command says that must succeed."""
    words = {"cwd": cwd, "env": {**os.environ, **environment}, "stdin": subprocess.DEVNULL}
    done = subprocess.run(
        command, **words, timeout=TIMEOUT_S, capture_output=True, text=True, check=False
    )  # type: ignore[call-overload]
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return str(done.stdout)


@pytest.mark.check
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CHECKS)
def test_check(name: str) -> None:
    ended(CHECKS[name])


@pytest.mark.check
@pytest.mark.parametrize("script", SCRIPTS)
def test_shell(script: str) -> None:
    ended(["bash", "-n", script])


@pytest.mark.check
def test_a_list_that_cannot_be_said_is_no_name_of_a_test() -> None:
    """As for `tools/test --list | head`, whose reader goes before the end."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            ["tools/test", "--list"],
            cwd=REPOSITORY,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    assert done.returncode != 0
    assert "nothing to test is named" not in done.stderr


DIES = "docs/CALLS.html#open-files-when-the-daemon-dies"
LEAVES = "docs/guide/first-bad-night.html#a-node-is-to-go-drain-it"
LOOKED_FOR = {
    "daemon dies": DIES,
    "open files": DIES,
    "what happens to an open file when the daemon dies": DIES,
    "fsync": "docs/CALLS.html#fsync",
    "what does fsync promise": "docs/CALLS.html#fsync",
    "drain": LEAVES,
    "drain node": LEAVES,
    "how to drain before a node goes": LEAVES,
    "parked": "docs/guide/words.html#parked",
    "what does parked mean": "docs/guide/words.html#parked",
    "interrupted": "docs/guide/words.html#interrupted",
    "withheld": "docs/guide/words.html#withheld",
    "rename": "docs/CALLS.html#rename-and-latest",
    "umount in use": "docs/TROUBLESHOOTING.html#umount-fails-or-is-in-use",
    "ram_per_user": "docs/reference/settings.html",
    "power loss": "docs/guide/first-bad-night.html#the-machine-lost-its-power",
}
"""What somebody types into the site's search, and the section that he wants: one of the first three
hits has to be it.
"""
HITS_READ = 3


@pytest.mark.check
@pytest.mark.slow
@pytest.mark.skipif(
    "ACPFS_SITE_PYTHON" not in os.environ or shutil.which("node") is None,
    reason="mkdocs-material or node is not here: `tools/test site` installs them, CI does not",
)
def test_site(tmp_path: Path) -> None:
    """Each link of each page leads somewhere, and the search finds what people look for.

    In CI `documents` looks at the links, of which this sees those that the site makes itself.
    """
    python = os.environ["ACPFS_SITE_PYTHON"]
    said = ended([python, "tools/site.py", str(tmp_path / "site"), *LOOKED_FOR])
    for words, section in LOOKED_FOR.items():
        hits = said.partition(f"\n{words}\n")[2].split("\n")[:HITS_READ]
        assert section in [hit.strip() for hit in hits], f"{words}: {said}"
    calls = (tmp_path / "site/docs/CALLS.html").read_text()
    assert '<a href="internals/clauses/closing.html#S14">S14</a>' in calls
    assert 'id="S14"' in (tmp_path / "site/docs/internals/clauses/closing.html").read_text()


@pytest.mark.check
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.clause("S532")
def test_package(tmp_path: Path) -> None:
    """A release but for its tag and bundle: builds are equal, the wheel is whole and mounts."""
    said = ended([PYTHON, "tools/release.py", "--rehearsal", str(tmp_path / "out")])
    assert "two builds are equal" in said
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    endings = [".cdx.json", "-man.tar.gz", "-py3-none-any.whl", ".tar.gz", "SHA256SUMS"]
    assert all(any(name.endswith(ending) for name in names) for ending in endings), names
    ended(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=str(tmp_path / "out"))
    (bill,) = (tmp_path / "out").glob("*.cdx.json")
    found = json.loads(bill.read_text())
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.5")
    assert {"attrs", "trio", "xxhash"} <= {one["name"] for one in found["components"]}
    refs = {one["ref"] for one in found["dependencies"]}
    assert all(set(one["dependsOn"]) <= refs for one in found["dependencies"])


@pytest.mark.check
@pytest.mark.clause("S532")
def test_a_release_needs_its_tag(tmp_path: Path) -> None:
    """In a clone, so that this checkout may be as it is."""
    clone = tmp_path / "clone"
    ended(["git", "clone", "-q", "--no-local", "--depth", "1", f"file://{REPOSITORY}", str(clone)])
    for spoil, why in (
        (lambda: None, "has no tag v"),
        (lambda: (clone / "README.md").write_text("other"), "is not clean"),
    ):
        spoil()
        done = subprocess.run(
            [PYTHON, "tools/release.py"], cwd=clone, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert why in done.stderr
        assert not (clone / "dist").exists()


@pytest.mark.check
def test_hooks_are_the_checks() -> None:
    """Whoever commits is told what CI would say."""
    hooks = (REPOSITORY / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    for command in CHECKS.values():
        words = [word for word in command if word not in (PYTHON, "-m")]
        assert " ".join(words) in hooks


@pytest.mark.check
@pytest.mark.slow
@pytest.mark.frameworks
@pytest.mark.timeout(1800)
def test_quickstart(tmp_path: Path) -> None:
    """The README's first command, with less to save: whole after the kill and after the loss of
    power, whatever the times.

    Where PyTorch is there already, as in CI, it is not installed once more for this.
    """
    there = {"ACPFS_QUICKSTART_PYTHON": PYTHON} if "ACPFS_TORCH_PYTHON" in os.environ else {}
    picture = tmp_path / "stalls.svg"
    size = os.environ.get("ACPFS_QUICKSTART_BYTES", str(DEMONSTRATION_BYTES))
    ended(
        ["bash", "tools/quickstart", "--quick"],
        ACPFS_QUICKSTART_BYTES=size,
        ACPFS_QUICKSTART_PICTURE=str(picture),
        **there,
    )
    assert picture.read_text().endswith("</svg>\n")
