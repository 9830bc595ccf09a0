"""What the guide says is typed by a reader, on a real mount; what needs a cluster is parsed."""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tests.rig.guide import KINDS, Block, Reader, blocks, pages
from tests.rig.mounts import AcpfsMount, is_mounted
from tests.rig.processes import NOBODY

WORDS_MAX = 8000
NOT_TYPED = ("read", "pod", "torch", "after torch")
PARSED = {"python": ast.parse, "yaml": yaml.safe_load}
KUBERNETES = "1.30"
HALF = """
import os, sys, time
file = open(sys.argv[1], "wb", buffering=0)
file.write(b"half")
print("written", flush=True)
time.sleep(600)
"""
OF_HIS_OWN = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
FUSE_FOR_ALL = """
mount -t tmpfs guide /mnt && mknod -m 666 /mnt/fuse c 10 229
mount --bind /mnt/fuse /dev/fuse
exec setpriv --reuid=65534 --regid=65534 --clear-groups \
    --inh-caps=+dac_read_search --ambient-caps=+dac_read_search -- "$@"
"""
"""A checkout may lie where only its owner enters, as what is installed for a user does not; hence
the capability.
"""
AS_USER = ("bash", "-euc", FUSE_FOR_ALL, "bash")
needs_mount = pytest.mark.skipif(
    os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
)
ALL = [block for page in pages() for block in blocks(page)]


def of(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.how not in NOT_TYPED]


TYPED = [page for page in pages() if of(page)]


@pytest.mark.clause("S569")
def test_the_guide_is_short() -> None:
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in pages())
    assert words <= WORDS_MAX


@pytest.mark.parametrize("block", ALL, ids=lambda block: block.place)
def test_each_block_says_how_it_is_tested_and_can_be_parsed(block: Block) -> None:
    assert block.how in KINDS, "above it: <!-- test: HOW -->, see tests/rig/guide.py"
    assert block.why or block.how != "read"
    if block.language == "bash":
        subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
    else:
        PARSED[block.language](block.text)


def test_no_command_hides_in_a_block_that_nobody_looks_at() -> None:
    """Indented lines are code as well, and fences without a language."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        assert len(blocks(page)) * 2 == len(re.findall(r"^```", text, re.MULTILINE)), page.name
        outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        assert re.findall(r"\n\n    \S.*", outside) == [], page.name


def test_links_to_tests_name_what_there_is() -> None:
    for block in ALL:
        for named in re.findall(r"`(tests/[\w/.]+)`", block.why or ""):
            assert os.path.exists(named), block.place


class Shell:
    """A page, its reader and its mount."""

    def __init__(self, reader: Reader, mount: AcpfsMount) -> None:
        self.reader = reader
        self.mount = mount

    def types(self, block: Block) -> None:
        before = getattr(self, f"_before_{(block.how or '').replace(' ', '_')}", None)
        if before is not None:
            before()
        said = self._as_user(block) if block.how == "user" else self.reader.types(block)
        if block.how == "interrupted":
            assert "interrupted" in said
            assert "discarded: 1" in said
        if block.how == "manifests":
            manifests = (self.reader.desk / "acpfs.yaml").read_text()
            for document in yaml.safe_load_all(manifests):
                if document["kind"] != "PodMonitor":  # is not Kubernetes' own
                    kubernetes_validate.validate(document, KUBERNETES, strict=True)

    def _before_mounted(self) -> None:
        if not is_mounted(self.mount.path):
            self.mount.start()
            run = self.mount.path / "run1"
            run.mkdir(exist_ok=True)
            (run / "model.pt").write_bytes(b"weights" * 1000)

    _before_after_torch = _before_mounted

    def _before_systemd(self) -> None:
        self.reader.with_systemd()

    def _before_stored(self) -> None:
        self._before_mounted()
        self.mount.flush()

    def _before_killed(self) -> None:
        self._before_mounted()
        self.mount.kill_processes()

    def _before_interrupted(self) -> None:
        self._before_mounted()
        words = [sys.executable, "-c", HALF, str(self.mount.path / "half.pt")]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "written\n"
            writer.send_signal(signal.SIGKILL)
        self.mount.wait_status(lambda status: status["interrupted"] == 1)

    def _as_user(self, block: Block) -> str:
        """With a /dev/fuse that all may open, as a machine has it that is set up for users; in name
        spaces of his own, so that all of it goes with his shell.
        """
        home = self.reader.home
        for owned in (home, home / "run", self.reader.desk):
            owned.mkdir(exist_ok=True)
            os.chown(owned, NOBODY, NOBODY)
        more = {"XDG_RUNTIME_DIR": str(home / "run"), "ACPFS_RUNTIME_DIR": ""}
        said = self.reader.types(block, before=(*OF_HIS_OWN, *AS_USER), **more)
        os.chown(self.reader.desk, 0, 0)
        assert "files go in the lane direct: the daemon moves their bytes" in said
        return said


@needs_mount
@pytest.mark.mount
@pytest.mark.slow
@pytest.mark.parametrize("page", TYPED, ids=lambda page: page.stem)
def test_what_a_page_says_works(page: Path, tmp_path: Path) -> None:
    if any(block.how == "user" for block in of(page)) and shutil.which("fusermount3") is None:
        pytest.skip("no fusermount3 here")
    tmp_path.chmod(0o755)
    mount = AcpfsMount(
        tmp_path / "storage", tmp_path / "mnt", "native", runtime_dir=tmp_path / "run", ram="256M"
    )
    reader = Reader(tmp_path, mount.runtime_dir)
    mount.runtime_dir.mkdir(mode=0o755)
    mount.watch()
    shell = Shell(reader, mount)
    try:
        for block in of(page):
            shell.types(block)
        if is_mounted(mount.path):
            mount.umount()
    finally:
        mount.abort()


@needs_mount
@pytest.mark.mount
@pytest.mark.frameworks
@pytest.mark.slow
@pytest.mark.skipif("ACPFS_TORCH_PYTHON" not in os.environ, reason="ACPFS_TORCH_PYTHON not set")
@pytest.mark.parametrize(
    "page",
    [page for page in pages() if any(block.how == "torch" for block in blocks(page))],
    ids=lambda page: page.stem,
)
def test_what_a_page_says_in_python_works(page: Path, tmp_path: Path) -> None:
    programs = [block.text for block in blocks(page) if block.how == "torch"]
    (tmp_path / "storage").mkdir()
    with AcpfsMount(
        tmp_path / "storage", tmp_path / "mnt", "native", runtime_dir=tmp_path / "run", ram="256M"
    ) as mount:
        reader = Reader(tmp_path / "reader", mount.runtime_dir)
        reader.storage = mount.backing
        reader.mountpoint = mount.path
        script = reader.desk / "train.py"
        script.write_text(reader.translated("\n".join(programs)))
        done = subprocess.run(
            [os.environ["ACPFS_TORCH_PYTHON"], str(script)],
            env=reader.environment(),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "PERSISTED" in done.stdout
        shell = Shell(reader, mount)
        for block in blocks(page):
            if block.how == "after torch":
                shell.types(block)
        assert (mount.backing / "run1/latest").read_text() == "step-100\n"


@pytest.mark.parametrize(
    "block",
    [block for block in ALL if block.how == "pod"],
    ids=lambda block: block.place,
)
def test_pods_are_what_kubernetes_takes(block: Block) -> None:
    kubernetes_validate.validate(yaml.safe_load(block.text), KUBERNETES, strict=True)
