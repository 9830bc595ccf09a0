"""Makes all files of a release: sdist, wheel, man pages, bundle, SBOM, checksums.

    tools/release --cut VERSION       before the tag: gives the tree that version (cut_release.py)
    tools/release                     from a clean tag vVERSION; to dist/VERSION
    tools/release --rehearsal DIR     from the working tree as it is, for the Python that runs it
    tools/release --fetch DIR         all that comes from a package index, for a release without a
                                      network: PIP_NO_INDEX=1 PIP_FIND_LINKS=DIR tools/release

The version is the one in `acpfs/__init__.py`, and the tag, the changelog's section and the names of
the files must agree with it. Everything is built twice, in two places and at two times, the SBOM
and the bundle too, and must be equal byte by byte; times in archives are the commit's. The wheel is
installed with each Python of `PYTHONS`, and mounts. One that is not here is no release, unless
`--allow-missing` takes it for one that was tried elsewhere.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import uuid
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from check_package import problems_of

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
BUILDER = "hatchling>=1.24"
TIMEOUT_S = 900
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
    "PIP_DISABLE_PIP_VERSION_CHECK": "1"
}
"""Without PYTHONPATH: it would have this checkout looked at in place of what was installed."""
INVENTORY = """
import importlib.metadata, json
print(json.dumps([[d.metadata["Name"], d.version,
    d.metadata.get("License-Expression") or d.metadata.get("License") or "", d.requires or []]
    for d in importlib.metadata.distributions()]))
"""
"""What is installed, with licences and what each requires."""
MOUNTS = """
set -e
"$1" mount "$2/backing" "$2/mnt" --ram 32M
trap '"$1" umount "$2/mnt"' EXIT
echo content >"$2/mnt/file"
"$1-ctl" "$2/mnt" flush >/dev/null
[ "$(cat "$2/backing/file")" = content ]
"""


class ReleaseError(Exception):
    """No release, for a reason that a person can act on."""


def run(*words: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """What a command says that must succeed.

    Raises:
        ReleaseError: it does not.
    """
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**ENVIRONMENT, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise ReleaseError(f"{' '.join(map(str, words))}:\n{done.stdout}{done.stderr}")
    return done.stdout


def version_of(tree: Path) -> str:
    """As the package says it, which is the only place."""
    for node in ast.parse((tree / "acpfs/__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            return str(node.value.value)
    raise ReleaseError("acpfs/__init__.py has no version")


def check_tag(version: str) -> None:
    """That what is here is what the tag names, and that the changelog knows it.

    Raises:
        ReleaseError: it is not.
    """
    if run("git", "status", "--porcelain"):
        raise ReleaseError("the working tree is not clean")
    if f"v{version}" not in run("git", "tag", "--points-at", "HEAD").split():
        raise ReleaseError(f"HEAD has no tag v{version}, and acpfs/__init__.py says {version}")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(rf"^## {re.escape(version)}\b", changelog, re.MULTILINE):
        raise ReleaseError(f"CHANGELOG.md has no section {version}")


def copy_tree(target: Path) -> None:
    """What git has or would add, and nothing that lies about."""
    names = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, names.split("\0")):
        source = ROOT / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target / name)


def pack_man_pages(tree: Path, target: Path, epoch: int) -> None:
    """The manual, for distributions: the same bytes whenever it is packed."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for page in sorted((tree / "docs").glob("man*/*.[18]")):
            info = tarfile.TarInfo(f"man{page.suffix[1:]}/{page.name}")
            info.size = page.stat().st_size
            info.mtime = epoch
            archive.addfile(info, io.BytesIO(page.read_bytes()))
    with target.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=epoch) as zipped:
        zipped.write(packed.getvalue())


def build(builder: Path, target: Path, epoch: int) -> None:
    """sdist, wheel and manual, from a copy of the tree in a place of its own."""
    target.mkdir()
    with tempfile.TemporaryDirectory() as place:
        tree = Path(place)
        copy_tree(tree)
        words = ("-m", "hatchling", "build", "-t", "sdist", "-t", "wheel", "-d", target)
        run(builder, *words, cwd=tree, SOURCE_DATE_EPOCH=str(epoch))
        pack_man_pages(tree, target / f"acpfs-{version_of(tree)}-man.tar.gz", epoch)


def digest(file: Path) -> str:
    """SHA-256."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def check_equal(first: Path, second: Path) -> None:
    """That two builds have the same files.

    Raises:
        ReleaseError: one differs.
    """
    found = [
        {path.name: digest(path) for path in sorted(directory.iterdir())}
        for directory in (first, second)
    ]
    if found[0] != found[1]:
        names = [name for name in found[0] if found[0][name] != found[1].get(name)]
        raise ReleaseError(f"two builds differ: {', '.join(names) or 'not the same files'}")


def make_environment(python: str | Path, target: Path, *words: str | Path) -> Path:
    """A virtual environment with something in it; its interpreter."""
    run(python, "-m", "venv", target)
    made = target / "bin/python"
    if words:
        run(made, "-m", "pip", "install", "--quiet", *words)
    return made


def bundle(wheel: Path, target: Path, epoch: int, versions: str) -> None:
    """One file with the wheel and all that it needs, for these versions of Python."""
    run(
        "bash",
        "tools/bundle",
        target / f"acpfs-{version_of(ROOT)}-linux-{os.uname().machine}.run",
        ACPFS_BUNDLE_WHEEL=str(wheel),
        ACPFS_BUNDLE_PYTHONS=versions,
        SOURCE_DATE_EPOCH=str(epoch),
    )


def fetch(target: Path, versions: str) -> None:
    """What a build and the bundle need from a package index, to a directory."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        scratch = Path(place)
        pip = make_environment(sys.executable, scratch / "pip")
        run(pip, "-m", "pip", "download", "--quiet", "--dest", target, BUILDER)
        builder = make_environment(
            sys.executable, scratch / "builder", "--find-links", target, BUILDER
        )
        run(builder, "-m", "hatchling", "build", "-t", "wheel", "-d", scratch)
        (wheel,) = scratch.glob("*.whl")
        bundle(wheel, scratch, 0, versions)
        (packed,) = scratch.glob("*.run")
        _script, _line, wheels = packed.read_bytes().partition(b"\n# -- wheels\n")
        with tarfile.open(fileobj=io.BytesIO(wheels)) as archive:
            archive.extractall(target, filter="data")


def check_wheel(python: str | Path, wheel: Path, version: str, target: Path) -> str:
    """Install it and mount; what was seen. The environment stays for the SBOM."""
    made = make_environment(python, target, wheel)
    said = run(target / "bin/acpfs", "--version", cwd=target).strip()
    if not said.endswith(version):
        raise ReleaseError(f"acpfs --version says {said!r}, not {version}")
    name = run(made, "-c", "import platform; print(platform.python_version())").strip()
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        return f"Python {name}: installs (not mounted: needs root and /dev/fuse)"
    with tempfile.TemporaryDirectory() as place:
        for directory in ("backing", "mnt"):
            (Path(place) / directory).mkdir()
        words = ("sh", "-c", MOUNTS, "mounts", target / "bin/acpfs", place)
        run(*words, cwd=target, ACPFS_RUNTIME_DIR=f"{place}/run")
    return f"Python {name}: installs, mounts, drains"


def sbom(python: Path, wheel: Path, version: str, epoch: int) -> dict[str, Any]:
    """CycloneDX 1.5: acpfs, and what was installed with its wheel. The same for the same wheel and
    the same versions beneath.
    """
    installed = [
        one
        for one in json.loads(run(python, "-c", INVENTORY))
        if one[0] not in ("pip", "setuptools")
    ]
    components = []
    for name, found, licence, _requires in sorted(installed):
        if name == "acpfs":
            continue
        one = {
            "type": "library",
            "bom-ref": f"pkg:pypi/{_normal(name)}@{found}",
            "name": name,
            "version": found,
            "purl": f"pkg:pypi/{_normal(name)}@{found}",
        }
        short = licence.splitlines()[0] if licence else ""
        components.append(one | ({"licenses": [{"license": {"name": short}}]} if short else {}))
    refs = {_normal(name): f"pkg:pypi/{_normal(name)}@{found}" for name, found, _, _ in installed}
    needs = {
        refs[_normal(name)]: sorted({refs[need] for need in map(_needed, requires) if need in refs})
        for name, _, _, requires in installed
    }
    own = refs["acpfs"]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, digest(wheel))}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(epoch, timezone.utc).isoformat(),
            "component": {
                "type": "application",
                "bom-ref": own,
                "name": "acpfs",
                "version": version,
                "purl": own,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
                "hashes": [{"alg": "SHA-256", "content": digest(wheel)}],
            },
        },
        "components": components,
        "dependencies": [
            {"ref": ref, "dependsOn": needed} for ref, needed in sorted(needs.items())
        ],
    }


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _needed(requirement: str) -> str:
    """The name in a requirement; "" where an extra wants it, which is not installed."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return "" if found is None or "extra ==" in requirement else _normal(found[0])


def pythons(*, allow_missing: bool) -> list[tuple[str, str | None]]:
    """Versions that are supported, and the interpreter of each; None: it is not here.

    Raises:
        ReleaseError: one is not here, and that is not allowed.
    """
    found: list[tuple[str, str | None]] = []
    for version in PYTHONS:
        path = shutil.which(f"python{version}")
        try:
            real = path and run(path, "-c", "import sys; print(sys.executable)").strip()
        except ReleaseError:  # a version switcher's stand-in for one that is not there
            real = None
        found.append((version, real or None))
    missing = [version for version, path in found if path is None]
    if missing and not allow_missing:
        raise ReleaseError(
            f"no Python {', '.join(missing)} on the path, and acpfs supports it: bring it here, or "
            "say --allow-missing where its wheel is tried elsewhere"
        )
    return found


def build_all(scratch: Path, epoch: int, versions: str, here: list[tuple[str, str | None]]) -> None:
    """All files but the checksums, twice: in `scratch/first` and `scratch/second`.

    Raises:
        ReleaseError: a part cannot be made.
    """
    builder = make_environment(sys.executable, scratch / "builder", BUILDER)
    version = version_of(ROOT)
    python = next(path for _name, path in here if path)
    for name in ("first", "second"):
        build(builder, scratch / name, epoch)
        (wheel,) = (scratch / name).glob("*.whl")
        if wrong := problems_of(wheel):
            raise ReleaseError("\n".join(wrong))
        installed = make_environment(python, scratch / f"{name}-installed", wheel)
        bom = json.dumps(sbom(installed, wheel, version, epoch), indent=1)
        (scratch / name / f"acpfs-{version}.cdx.json").write_text(bom + "\n", encoding="utf-8")
        bundle(wheel, scratch / name, epoch, versions)


def main() -> int:
    """Make it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rehearsal", metavar="DIRECTORY", type=Path, help="no tag is needed")
    parser.add_argument("--fetch", metavar="DIRECTORY", type=Path, help="what pip would fetch")
    parser.add_argument("--own-python", action="store_true", help="fetch for this one only")
    parser.add_argument(
        "--allow-missing",
        action="store_true",
        help="release though a supported Python is not here",
    )
    given = parser.parse_args()
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    versions = own if given.rehearsal or given.own_python else " ".join(PYTHONS)
    if given.fetch is not None:
        fetch(given.fetch, versions)
        return 0
    version = version_of(ROOT)
    out = given.rehearsal or ROOT / "dist" / version
    if out.exists() and any(out.iterdir()):
        raise ReleaseError(f"{out} is not empty")
    if given.rehearsal is None:
        check_tag(version)
    here: list[tuple[str, str | None]] = [(own, sys.executable)]
    if given.rehearsal is None:
        here = pythons(allow_missing=given.allow_missing)
    epoch = int(run("git", "log", "-1", "--format=%ct"))
    with tempfile.TemporaryDirectory() as place:
        scratch = Path(place)
        build_all(scratch, epoch, versions, here)
        check_equal(scratch / "first", scratch / "second")
        (wheel,) = (scratch / "first").glob("*.whl")
        seen = [
            f"Python {name}: NOT HERE, and not tried"
            if python is None
            else check_wheel(python, wheel, version, scratch / f"with{name}")
            for name, python in here
        ]
        files = sorted((scratch / "first").iterdir())
        sums = "".join(f"{digest(file)}  {file.name}\n" for file in files)
        (scratch / "first/SHA256SUMS").write_text(sums, encoding="ascii")
        shutil.copytree(scratch / "first", out, dirs_exist_ok=True)
    print(sums + "\n".join(["two builds are equal", *seen]))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ReleaseError as error:
        sys.exit(f"no release: {error}")
