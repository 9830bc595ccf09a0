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
import yaml

from tests.formats.leave import ALL

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
LEAVES = "docs/guide/first-bad-night.html#before-a-node-goes-drain-it"
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
FIRST = {
    "open file when the daemon dies": DIES,
    "what happens to an open file when the daemon dies": DIES,
    "what fsync promises": "docs/CALLS.html#fsync",
    "what does fsync promise": "docs/CALLS.html#fsync",
    "drain before a node goes": LEAVES,
    "how to drain before a node goes": LEAVES,
    "parked": "docs/guide/words.html#parked",
    "downgrade": "docs/guide/install.html#upgrade-and-downgrade",
    "upgrade": "docs/guide/install.html#upgrade-and-downgrade",
    "sbom": "docs/OPERATIONS.html",
}
"""The same, where nothing else may come before: one click. Of a page any section will do."""
HITS_READ = 3


@pytest.mark.check
@pytest.mark.slow
@pytest.mark.skipif(
    "ACPFS_SITE_PYTHON" not in os.environ,
    reason="mkdocs-material is not here: `tools/test site` installs it",
)
@pytest.mark.clause("S567")
def test_site(tmp_path: Path) -> None:
    """Each link of each page leads somewhere, those that the site makes itself as well."""
    python = os.environ["ACPFS_SITE_PYTHON"]
    ended([python, "tools/site.py", str(tmp_path / "site")])
    calls = (tmp_path / "site/docs/CALLS.html").read_text()
    assert '<a href="internals/clauses/closing.html#S14">S14</a>' in calls
    assert 'id="S14"' in (tmp_path / "site/docs/internals/clauses/closing.html").read_text()


@pytest.mark.check
@pytest.mark.slow
@pytest.mark.skipif(
    "ACPFS_SITE_PYTHON" not in os.environ or shutil.which("node") is None,
    reason="no node (50 MiB with its libraries), which runs the search's script as a browser does, "
    "or no mkdocs-material: `tools/test site` installs both; CI installs no node",
)
@pytest.mark.clause("S567")
def test_the_sites_search_finds_what_people_look_for(tmp_path: Path) -> None:
    python = os.environ["ACPFS_SITE_PYTHON"]
    queries = [*LOOKED_FOR, *FIRST]
    said = ended([python, "tools/site.py", str(tmp_path / "site"), *queries])

    def hits(words: str) -> list[str]:
        lines = said.partition(f"\n{words}\n")[2].split("\n")[:HITS_READ]
        return [line.strip() for line in lines]

    wrong = {words: hits(words) for words, one in LOOKED_FOR.items() if one not in hits(words)}
    first = {
        words: hits(words) for words, one in FIRST.items() if not hits(words)[0].startswith(one)
    }
    assert (wrong, first) == ({}, {})


@pytest.mark.check
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.clause("S532")
def test_package(tmp_path: Path) -> None:
    """A release but for its tag and other Pythons: builds are equal, the wheel is whole and mounts.

    As root without a network, with what was fetched before.
    """
    wheels = tmp_path / "wheels"
    ended([PYTHON, "tools/release.py", "--own-python", "--fetch", str(wheels)])
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull}
    said = ended(
        [
            *(["unshare", "--net"] if os.geteuid() == 0 else []),
            *(PYTHON, "tools/release.py", "--rehearsal", str(tmp_path / "out")),
        ],
        **offline,
    )
    assert "two builds are equal" in said
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    endings = [".cdx.json", "-man.tar.gz", "-py3-none-any.whl", ".tar.gz", "SHA256SUMS", ".run"]
    assert all(any(name.endswith(ending) for name in names) for ending in endings), names
    ended(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=str(tmp_path / "out"))
    (bill,) = (tmp_path / "out").glob("*.cdx.json")
    found = json.loads(bill.read_text())
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.5")
    assert {"attrs", "trio", "xxhash"} <= {one["name"] for one in found["components"]}
    refs = {one["ref"] for one in found["dependencies"]}
    assert all(set(one["dependsOn"]) <= refs for one in found["dependencies"])


@pytest.mark.check
@pytest.mark.clause("S566")
def test_a_python_that_is_not_here_is_no_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was said and passed over: nobody reads what a release that succeeds prints."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "tools"))
    import release

    (tmp_path / "python3.10").symlink_to(PYTHON)
    stand_in = tmp_path / "python3.13"
    stand_in.write_text("#!/bin/sh\nexit 127\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(release.ReleaseError, match=r"no Python 3\.11, 3\.12, 3\.13, 3\.14 on the"):
        release.pythons(allow_missing=False)
    found = dict(release.pythons(allow_missing=True))
    assert found.keys() == set(release.PYTHONS)
    assert [version for version, path in found.items() if path] == ["3.10"]


@pytest.mark.check
@pytest.mark.clause("S566")
@pytest.mark.parametrize("differs", ["acpfs-1.cdx.json", "acpfs-1-linux-x.run", "acpfs-1.whl"])
def test_two_builds_that_differ_are_no_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, differs: str
) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "tools"))
    import release

    for build in ("first", "second"):
        (tmp_path / build).mkdir()
        (tmp_path / build / differs).write_text(build)
        (tmp_path / build / "equal").write_text("equal")
    with pytest.raises(release.ReleaseError, match=rf"two builds differ: {differs}$"):
        release.check_equal(tmp_path / "first", tmp_path / "second")
    (tmp_path / "second" / differs).write_text("first")
    release.check_equal(tmp_path / "first", tmp_path / "second")


@pytest.mark.check
@pytest.mark.clause("S532")
def test_a_release_needs_its_tag(tmp_path: Path) -> None:
    """In a clone, so that this checkout may be as it is."""
    clone = tmp_path / "clone"
    words = ["git", "clone", "-q", "--no-local", "--no-tags", "--depth", "1"]
    ended([*words, f"file://{REPOSITORY}", str(clone)])
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
@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
)
@pytest.mark.clause("S513")
def test_a_version_is_cut_in_one_step_and_may_be_released(tmp_path: Path) -> None:
    """In a clone: what every later version has to read is there, and all names agree."""
    clone = tmp_path / "clone"
    ended(["git", "clone", "-q", "--no-local", "--depth", "1", f"file://{REPOSITORY}", str(clone)])
    changelog = clone / "CHANGELOG.md"
    changelog.write_text(
        changelog.read_text().replace("## Unreleased\n", "## Unreleased\n\nSomething new.\n", 1)
    )
    commit = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-a", "-m", "a"]
    ended(commit, cwd=str(clone))
    said = ended([PYTHON, "tools/cut_release.py", "77.1.0rc1"], cwd=str(clone))
    assert "git tag -s v77.1.0rc1, tools/release" in said
    assert '"77.1.0rc1"' in (clone / "acpfs/__init__.py").read_text()
    text = changelog.read_text()
    assert text.index("## Unreleased\n\nNothing yet.") < text.index("## 77.1.0rc1 (")
    assert text.index("## 77.1.0rc1 (") < text.index("Something new.")
    assert 'acpfs 77.1.0rc1" "77.1.0rc1"' in (clone / "docs/man/acpfs.1").read_text()
    assert "acpfs-77.1.0rc1-linux" in (clone / "docs/OPERATIONS.md").read_text()
    left = sorted(path.name for path in (clone / "tests/formats/fixtures/77.1.0rc1").iterdir())
    assert left == sorted(ALL)
    again = subprocess.run(
        [PYTHON, "tools/cut_release.py", "77.1.0"],
        cwd=clone,
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 1
    assert "not cut: the working tree is not clean" in again.stderr
    ended(["git", "add", "-A"], cwd=str(clone))
    ended(commit, cwd=str(clone))
    ended(["git", "tag", "v77.1.0rc1"], cwd=str(clone))
    check = "import release; release.check_tag(release.version_of(release.ROOT))"
    ended([PYTHON, "-c", check], cwd=str(clone), PYTHONPATH=str(clone / "tools"))


@pytest.mark.check
@pytest.mark.clause("S513")
def test_what_cannot_be_cut_is_said_and_nothing_is_written(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    ended(["git", "clone", "-q", "--no-local", "--depth", "1", f"file://{REPOSITORY}", str(clone)])
    nothing = (clone / "CHANGELOG.md").read_text().partition("## Unreleased\n")[0]
    for version, unreleased, why in (
        ("0.0.9", "- new\n", "0.0.9 is not newer than "),
        ("77.0", "- new\n", "77.0 is no version such as"),
        ("77.0.0", "Nothing yet.\n\n## 0.0.1\n\n- old\n", "nothing under Unreleased"),
        ("77.0.0", "- new\n\n## 77.0.0\n\n- old\n", "has a section 77.0.0"),
    ):
        (clone / "CHANGELOG.md").write_text(f"{nothing}## Unreleased\n\n{unreleased}")
        ended(
            [
                "git",
                "-c",
                "user.name=a",
                "-c",
                "user.email=a@b",
                "commit",
                "--allow-empty",
                "-qam",
                "a",
            ],
            cwd=str(clone),
        )
        done = subprocess.run(
            [PYTHON, "tools/cut_release.py", version],
            cwd=clone,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, why in done.stderr) == (1, True), done.stderr
        assert ended(["git", "status", "--porcelain"], cwd=str(clone)) == ""


@pytest.mark.check
def test_versions_have_an_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "tools"))
    from cut_release import key_of

    ordered = ["0.1.0", "1.0.0a1", "1.0.0b1", "1.0.0rc1", "1.0.0rc2", "1.0.0rc10", "1.0.0", "1.0.1"]
    assert sorted(set(ordered), key=key_of) == ordered


@pytest.mark.check
@pytest.mark.clause("S513")
def test_a_release_has_the_section_of_its_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has to have come since; it said that nothing is unreleased, and cut nothing."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "tools"))
    from cut_release import NOTHING_YET, with_section

    older = "## 0.9.0 (1)\n\n- old\n"
    for since, told in ((NOTHING_YET, ""), ("- mended\n", "\n- mended\n")):
        before = f"# C\n\n## Unreleased\n\n{since}\n## 1.0.0rc1 (2)\n\n- all\n\n{older}"
        assert with_section(before, "1.0.0", "3", "1.0.0rc1") == (
            f"# C\n\n## Unreleased\n\n{NOTHING_YET}\n## 1.0.0 (3)\n{told}\n- all\n\n{older}"
        )


@pytest.mark.check
def test_hooks_are_the_checks() -> None:
    """Whoever commits is told what CI would say."""
    hooks = (REPOSITORY / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    for command in CHECKS.values():
        words = [word for word in command if word not in (PYTHON, "-m")]
        assert " ".join(words) in hooks


@pytest.mark.check
@pytest.mark.clause("S569")
def test_the_hooks_refuse_a_bad_commit(tmp_path: Path) -> None:
    """Each by the command that pre-commit calls, in a clone; without the types, which take long."""
    clone = tmp_path / "clone"
    ended(["git", "clone", "-q", "--no-local", "--depth", "1", f"file://{REPOSITORY}", str(clone)])
    (clone / ".venv/dev").mkdir(parents=True)
    (clone / ".venv/dev/bin").symlink_to(Path(sys.prefix) / "bin")
    (repository,) = yaml.safe_load((clone / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = {hook["id"]: hook["entry"].split() for hook in repository["hooks"]}
    bad = {
        "format": ("acpfs/bad.py", "one = {  }\n"),
        "lint": ("acpfs/bad.py", "import os\n"),
        "documents": ("docs/bad.md", "[one](nowhere.md)\n"),
    }
    for hook, (name, text) in bad.items():
        ended(hooks[hook], cwd=str(clone))
        (clone / name).write_text(text)
        done = subprocess.run(
            hooks[hook], cwd=clone, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert (done.returncode, Path(name).name in done.stdout + done.stderr) == (1, True), hook
        (clone / name).unlink()


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
