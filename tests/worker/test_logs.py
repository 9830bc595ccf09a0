"""Logs: structured, rotating, re-opened on demand, level changeable."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from acpfs.logger import get_logger
from acpfs.worker import logs


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers = root.handlers[:]
    level = root.level
    root.handlers = []
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers = handlers
    root.setLevel(level)


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_file_holds_one_json_object_per_line(tmp_path: Path) -> None:
    file = tmp_path / "log" / "x.log"
    logs.configure("info", file)
    get_logger("acpfs.test").info("mounted", mount="/mnt/\udcff")
    logging.getLogger("elsewhere").warning("plain %s", "text")
    first, second = lines(file)
    assert (first["event"], first["level"], first["logger"], first["mount"]) == (
        "mounted",
        "info",
        "acpfs.test",
        "/mnt/\udcff",
    )
    assert (second["event"], second["level"]) == ("plain text", "warning")


def test_a_stack_stays_in_its_line(tmp_path: Path) -> None:
    logs.configure("info", tmp_path / "x.log")
    try:
        raise ValueError("boom")
    except ValueError:
        get_logger("a").exception("failed")
    (line,) = lines(tmp_path / "x.log")
    assert "ValueError: boom" in str(line["exception"])


def test_stderr_has_key_value_lines(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", None)
    get_logger("a").info("mounted", mount="/mnt/x y", n=3)
    line = capsys.readouterr().err
    assert "level=info logger=a event=mounted" in line
    assert 'mount="/mnt/x y" n=3' in line


def test_the_journal_gets_priorities(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOURNAL_STREAM", "1:2")
    logs.configure("info", None)
    get_logger("a").error("bad")
    assert capsys.readouterr().err.startswith("<3>timestamp=")


def test_the_level_changes_at_run_time(tmp_path: Path) -> None:
    file = tmp_path / "x.log"
    logs.configure("warning", file)
    log = get_logger("a")
    log.info("unseen")
    logs.set_level("info")
    log.info("seen")
    assert [line["event"] for line in lines(file)] == ["seen"]


def test_a_file_that_was_moved_away_is_opened_anew(tmp_path: Path) -> None:
    file = tmp_path / "x.log"
    logs.configure("info", file)
    get_logger("a").info("one")
    file.rename(tmp_path / "moved")
    logs.reopen()
    get_logger("a").info("two")
    assert [line["event"] for line in lines(file)] == ["two"]
    assert [line["event"] for line in lines(tmp_path / "moved")] == ["one"]


def test_files_rotate_and_stderr_follows(tmp_path: Path) -> None:
    code = (
        "import os,sys\nfrom pathlib import Path\nfrom acpfs.logger import get_logger\n"
        "from acpfs.worker import logs\nlogs.FILE_BYTES_MAX=2000\n"
        "logs.configure('info', Path(sys.argv[1]), detached=True)\nlog=get_logger('a')\n"
        "[log.info('filler', n=n, text='x'*100) for n in range(200)]\nos.write(2, b'from a C "
        "library\\n')"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "x.log")],
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["x.log", "x.log.1", "x.log.2", "x.log.3", "x.log.4"]
    assert all(file.stat().st_size <= 2100 for file in files)
    assert files[0].read_text().endswith("from a C library\n")


def test_limits_are_as_documented() -> None:
    assert (logs.FILE_BYTES_MAX, logs.FILES_KEPT) == (10_000_000, 5)
