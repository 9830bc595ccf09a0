"""What `acpfs doctor` finds, on this machine and on one whose kernel lacks something."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from acpfs.backing import late_calls as late
from acpfs.mounting import doctor, transports
from acpfs.ram.mounts import kind_at, mount_tmpfs, unmount
from acpfs.transport.native.protocol import InitFlag
from acpfs.transport.native.serve import MASK_VARIABLE
from tests.rig.faultfs import FaultFs
from tests.rig.mounts import mounts_below

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(
        os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
    ),
]
SUBJECTS = {
    "kernel",
    "fuse",
    "transport",
    "passthrough",
    "requests",
    "fuse features",
    "memory",
    "control group",
    "huge pages",
    "shared memory",
    "mount helper",
    "backing directory",
    "room",
    "late calls",
}


def spill_texts(spill: Path, backing: Path | None = None) -> list[tuple[str, str]]:
    """(verdict, text) of what is found about a spill directory."""
    return [
        (finding.verdict, finding.text)
        for finding in doctor.examine(backing, spill)
        if finding.subject == "spill directory"
    ]


def examined(tmp_path: Path, mask: int) -> dict[str, dict[str, str]]:
    """Subject → its last finding."""
    (tmp_path / "backing").mkdir()
    environment = {**os.environ, MASK_VARIABLE: hex(mask), "TMPDIR": str(tmp_path)}
    command = [
        sys.executable,
        "-m",
        "acpfs.cli.main",
        "doctor",
        str(tmp_path / "backing"),
        "--json",
    ]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not mounts_below(tmp_path)
    assert not (tmp_path / "backing/.acpfs").exists()
    return {finding["subject"]: finding for finding in json.loads(done.stdout)}


def test_every_subject_is_examined_and_nothing_is_left(tmp_path: Path) -> None:
    found = examined(tmp_path, (1 << 64) - 1)
    assert found.keys() >= SUBJECTS
    assert "auto is native" in found["transport"]["text"]
    assert "KiB each" in found["requests"]["text"]


def test_a_kernel_that_lacks_things_is_told_with_what_it_costs(tmp_path: Path) -> None:
    found = examined(
        tmp_path,
        ((1 << 64) - 1) & ~int(InitFlag.PASSTHROUGH | InitFlag.HAS_RESEND | InitFlag.MAX_PAGES),
    )
    assert (found["passthrough"]["verdict"], "6.9" in found["passthrough"]["text"]) == (
        "note",
        True,
    )
    assert "resending" in found["fuse features"]["text"]
    assert "sysctl fs.fuse.max_pages_limit" in found["requests"]["text"]


NOTE = "late-calls"


def late_calls_through(backing: Path, second: Path | None) -> tuple[str, str]:
    (found,) = (
        finding
        for finding in doctor.examine(backing, second=second)
        if finding.subject == "late calls"
    )
    return found.verdict, found.text


def late_calls(backing: Path, second: Path | None = None) -> tuple[str, str]:
    verdict, text = late_calls_through(backing, second)
    left = sorted(path.name for path in backing.glob(".acpfs/*"))
    assert left in ([], [NOTE])
    return verdict, text


def noted(backing: Path) -> bool:
    """What members are told of that storage."""
    return bool(json.loads((backing / ".acpfs" / NOTE).read_bytes())["refused"])


def set_aside(there: Path) -> None:
    """No fence: the directory goes on under its number."""
    (there / "later").mkdir()
    os.rename(there / "earlier/staged", there / "later/staged")
    os.rename(there / "earlier", there / "aside")


@pytest.mark.clause("S555", "S614")
def test_whether_late_calls_are_refused_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backing = tmp_path / "backing"
    second = tmp_path / "second"
    for directory in (backing, second):
        directory.mkdir()
    verdict, text = late_calls(backing)
    assert (verdict, "is refused" in text, "--second" in text) == ("ok", True, True)
    verdict, text = late_calls(backing, second)
    assert (verdict, "is no other mount of" in text) == ("bad", True)
    subprocess.run(["mount", "--bind", backing, second], check=True)
    try:
        verdict, text = late_calls(backing, second)
        assert (verdict, f"made through {second}" in text) == ("ok", True)
        assert noted(backing)
        # As a storage would answer for which a removed directory goes on.
        monkeypatch.setattr(late, "_fence", set_aside)
        verdict, text = late_calls(backing, second)
        assert (verdict, "a store" in text) == ("note", False)
        assert not noted(backing)
        assert "carried out: a removal, a new file" in text
        # And one for which the file that was moved is where it was.
        monkeypatch.setattr(late, "_fence", lambda _there: None)
        verdict, text = late_calls(backing, second)
        assert "carried out: a store, a removal, a new file" in text
        assert "nobody may take over a node's log here" in text
    finally:
        subprocess.run(["umount", "-l", second], check=True)


@pytest.mark.clause("S614")
def test_what_was_good_is_withdrawn_by_whatever_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also through the same client, by which nothing good is shown."""
    late_calls(tmp_path, tmp_path)
    assert noted(tmp_path)
    assert late_calls(tmp_path)[0] == "ok"
    assert noted(tmp_path)
    monkeypatch.setattr(late, "_fence", set_aside)
    assert late_calls(tmp_path)[0] == "note"
    assert not noted(tmp_path)


@pytest.mark.clause("S614")
def test_what_is_noted_is_of_this_storage_alone(tmp_path: Path) -> None:
    """It is copied elsewhere with all that is in it."""
    for name in ("backing", "copy"):
        (tmp_path / name).mkdir()
    late_calls(tmp_path / "backing", tmp_path / "backing")
    shutil.copytree(tmp_path / "backing/.acpfs", tmp_path / "copy/.acpfs")
    text = (tmp_path / "copy/.acpfs" / NOTE).read_bytes()
    for name, is_it in (("backing", True), ("copy", False)):
        with opened(tmp_path / name) as fd:
            assert late.is_refusal_noted(text, late.storage_at(fd, kind_at(fd))) is is_it
            assert not late.is_refusal_noted(text, late.storage_at(fd, "nfs4"))


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[int]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


@pytest.mark.clause("S555", "S614")
def test_late_calls_of_a_fuse_client_are_tried_against_the_storage_below(
    fault_fs: FaultFs,
) -> None:
    """Nothing is noted: which of them is the client of the other is not known, as with bindfs."""
    verdict, text = late_calls_through(fault_fs.path, fault_fs.source)
    assert verdict == "ok", text
    assert "members are not told" in text
    assert not (fault_fs.path / ".acpfs").exists()


@pytest.mark.clause("S614")
def test_the_same_client_of_a_network_s_storage_proves_nothing(fault_fs: FaultFs) -> None:
    """It knows what it removed itself, and asks no server."""
    verdict, text = late_calls_through(fault_fs.path, fault_fs.path / ".")
    assert verdict == "ok"
    assert "members are not told" in text
    assert not (fault_fs.path / ".acpfs").exists()


def test_a_spill_directory_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "backing").mkdir()
    (tmp_path / "disk").mkdir()
    ((verdict, text),) = spill_texts(tmp_path / "missing")
    assert (verdict, "does not exist" in text) == ("bad", True)
    ((verdict, text),) = spill_texts(tmp_path / "backing", tmp_path / "backing")
    assert (verdict, "lie one inside the other" in text) == ("bad", True)
    (_, text), *notes = spill_texts(tmp_path / "disk", tmp_path / "backing")
    assert "GiB free" in text
    assert any("file system of the backing directory" in note for _verdict, note in notes)
    mount_tmpfs(tmp_path / "disk", "size=4M")
    try:
        (verdict, _), *notes = spill_texts(tmp_path / "disk", tmp_path / "backing")
        assert [verdict, *(verdict for verdict, _note in notes)] == ["ok", "note", "note"]
        assert ["lies in memory" in notes[0][1], "less than the RAM tier" in notes[1][1]] == [
            True,
            True,
        ]
    finally:
        unmount(tmp_path / "disk", detach=True)


def test_what_can_be_mended_is_a_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each part below what it is for, in shell syntax, whatever the texts have in them."""
    monkeypatch.setattr(transports, "has_libfuse", lambda: False)
    monkeypatch.setattr(transports, "KERNEL_MIN", (99, 0))
    monkeypatch.setattr(doctor, "FUSE_SYSCTLS", tmp_path)
    (tmp_path / "max_request_timeout").write_text("30\n")
    (tmp_path / "default_request_timeout").write_text("0\n")
    found = {finding.subject: finding for finding in doctor.examine(None)}
    assert (found["transport"].verdict, "session" in found) == ("bad", False)
    told = doctor.script(found.values())
    assert "# transport: " in told
    assert "-m pip install 'acpfs[libfuse]'\n" in told
    assert "sysctl -w fs.fuse.max_request_timeout=0\n" in told
    subprocess.run(["sh", "-n"], input=told, text=True, check=True, timeout=60)
    assert doctor.script([doctor.Finding("kernel", "ok", "Linux")]) == "# nothing to mend"


def test_the_script_is_printed_and_not_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "acpfs.cli.main", "doctor", "--fix"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line and not line.startswith("#")]
    assert all(line.startswith(("ln -s ", "sysctl -w ", "echo ")) for line in lines), lines


@pytest.mark.clause("S446")
@pytest.mark.skipif(os.getuid() != 0, reason="mounts a tmpfs")
def test_a_full_backing_directory_is_found(tmp_path: Path) -> None:
    """Everything else about it works: staging files can be made and renamed, and no byte of a save
    finds room.
    """
    full = tmp_path / "full"
    full.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4M", "tmpfs", str(full)], check=True)
    try:
        found = {finding.subject: finding for finding in doctor.examine(full)}
        assert found["room"].verdict in ("ok", "note")
        fill(full / "all of it")
        found = {finding.subject: finding for finding in doctor.examine(full)}
        assert found["room"].verdict == "bad"
        assert f"{full} is full" in found["room"].text
    finally:
        subprocess.run(["umount", str(full)], check=True)


def fill(file: Path) -> None:
    with contextlib.suppress(OSError), open(file, "wb", buffering=0) as filling:
        while filling.write(bytes(1 << 16)):
            pass
