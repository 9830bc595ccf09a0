"""`acpfs with`: a mount around a command, and what becomes of signals and exit codes.

How commands follow each other is told with doubles of mount and umount, which wait where a test
wants them to; that both are right, with a mount.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.rig.mounts import AcpfsMount, is_mounted
from tests.rig.storage.servers import until

LIMIT_S = 60
PROGRAM = """
import json, sys
from acpfs.cli.around import run_between
before, command, after = json.loads(sys.argv[1])
sys.exit(run_between(before, command, after, {"PATH": "/usr/bin:/bin", "ACPFS_DIR": "/there"}))
"""
AS_INIT = """
import ctypes, os, sys
PR_SET_CHILD_SUBREAPER = 36  # prctl(2): as the first process of a container has it
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
"""
AS_IN_FRONT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # as whoever has the terminal has it
from acpfs.cli.main import main
sys.exit(main())
"""


class Story:
    """Three shell scripts, one after the other, each of which writes down what becomes of it."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.said = top / "said"
        self.said.touch()
        self.before = self.says("before")
        self.command = self.says("command")
        self.after = self.says("after")

    def says(self, word: str, does: str = "") -> str:
        return f"echo {word} >> {self.said}; {does}"

    def waits(self, word: str) -> str:
        """Until `let_go`."""
        return self.says(word, f"until [ -e {self.top}/{word}-goes-on ]; do sleep 0.05; done")

    def let_go(self, word: str) -> None:
        (self.top / f"{word}-goes-on").touch()

    def lines(self) -> list[str]:
        return self.said.read_text().splitlines()

    @contextmanager
    def begun(self, *, first: str = "", ignored: int = 0) -> Iterator[subprocess.Popen[bytes]]:
        """`first`: what its process does first. `ignored`: a signal that its parent ignores."""
        steps = [["sh", "-c", script] for script in (self.before, self.command, self.after)]
        # whoever runs the tests in the background has it ignored
        first += "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        if ignored:
            first += f"signal.signal({ignored}, signal.SIG_IGN)\n"
        words = [sys.executable, "-c", first + PROGRAM, json.dumps(steps)]
        with subprocess.Popen(words, start_new_session=True) as process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)

    def run(self) -> int:
        with self.begun() as process:
            return process.wait(LIMIT_S)


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


@pytest.mark.clause("S619")
@pytest.mark.parametrize("code", [0, 3])
def test_the_commands_exit_code_is_the_whole_one(story: Story, code: int) -> None:
    story.command += f"exit {code}"
    assert story.run() == code
    assert story.lines() == ["before", "command", "after"]


@pytest.mark.clause("S619")
def test_without_the_mount_the_command_does_not_run(story: Story) -> None:
    story.before += "exit 6"
    assert story.run() == 6
    assert story.lines() == ["before"]


@pytest.mark.clause("S619")
@pytest.mark.parametrize("code", [0, 3])
def test_what_is_not_unmounted_is_a_failure(story: Story, code: int) -> None:
    story.command += f"exit {code}"
    story.after += "exit 4"
    assert story.run() == 1


@pytest.mark.clause("S619")
def test_a_command_that_was_killed_has_its_signals_code_and_is_unmounted(story: Story) -> None:
    story.command += "kill -KILL $$"
    assert story.run() == 128 + signal.SIGKILL
    assert story.lines() == ["before", "command", "after"]


@pytest.mark.clause("S619")
@pytest.mark.parametrize(("is_there", "code"), [(False, 127), (True, 126)])
def test_a_command_that_cannot_be_started_is_unmounted(
    tmp_path: Path, story: Story, is_there: bool, code: int
) -> None:
    program = tmp_path / "program"
    if is_there:
        program.write_text("not a program")
    words = json.dumps([["true"], [str(program)], ["sh", "-c", story.after]])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, words],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == code
    assert done.stderr.startswith(f"{program}: ")
    assert story.lines() == ["after"]


@pytest.mark.clause("S619")
def test_its_environment_is_the_commands(story: Story) -> None:
    story.command = f'echo "$ACPFS_DIR" >> {story.said}'
    assert story.run() == 0
    assert story.lines() == ["before", "/there", "after"]


@pytest.mark.clause("S619")
@pytest.mark.parametrize("code", [0, 143])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_is_the_commands_which_may_save_first(story: Story, name: str, code: int) -> None:
    """As often as it comes; the drain begins when the command has ended, not before."""
    number = signal.Signals[name]
    told = f"trap 'echo told >> {story.said}; exit {code}' {name.removeprefix('SIG')}; "
    story.command = told + story.says("command", "while :; do sleep 0.05; done")
    with story.begun() as process:
        until(lambda: "command" in story.lines(), "the command began")
        process.send_signal(number)
        assert process.wait(LIMIT_S) == code
    assert story.lines() == ["before", "command", "told", "after"]


@pytest.mark.clause("S619")
def test_an_end_that_comes_while_it_mounts_is_not_missed(story: Story) -> None:
    """The command would go on until all of it is killed."""
    story.before = story.waits("before")
    with story.begun() as process:
        until(lambda: bool(story.lines()), "it mounts")
        process.send_signal(signal.SIGTERM)
        story.let_go("before")
        assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert story.lines() == ["before", "after"]


@pytest.mark.clause("S619")
def test_no_end_is_missed_however_soon_it_comes(tmp_path: Path) -> None:
    """Between the mount and the command is a moment in which neither of them runs."""
    for turn in range(20):
        (tmp_path / f"{turn}").mkdir()
        story = Story(tmp_path / f"{turn}")
        story.before = story.waits("before")
        story.command = story.says("command", "exec sleep 1000")
        with story.begun() as process:
            until(lambda: bool(story.lines()), "it mounts")  # noqa: B023
            story.let_go("before")
            # about when the first one ends; each turn at another moment
            threading.Event().wait(0.05 + 0.002 * turn)
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
        assert story.lines()[-1] == "after"


@pytest.mark.clause("S619")
def test_a_second_signal_does_not_end_the_drain(story: Story) -> None:
    story.after = story.waits("after")
    with story.begun() as process:
        until(lambda: "after" in story.lines(), "it drains")
        process.send_signal(signal.SIGTERM)
        story.let_go("after")
        assert process.wait(LIMIT_S) == 0


@pytest.mark.clause("S619")
def test_a_signal_that_is_ignored_is_no_end(story: Story) -> None:
    """nohup."""
    story.before = story.waits("before")
    with story.begun(ignored=signal.SIGHUP) as process:
        until(lambda: bool(story.lines()), "it mounts")
        process.send_signal(signal.SIGHUP)
        story.let_go("before")
        assert process.wait(LIMIT_S) == 0
    assert story.lines() == ["before", "command", "after"]


@pytest.mark.clause("S619")
def test_nobody_whose_parent_has_gone_is_left_as_a_zombie(story: Story) -> None:
    """As the first process of a container it has children that it did not start."""
    left = story.top / "left"
    story.command += f"(true & echo $! > {left}); exec sleep 0.3"
    story.after = story.waits("after")
    with story.begun(first=AS_INIT) as process:
        until(lambda: "after" in story.lines(), "it drains")
        orphan = int(left.read_text())
        until(lambda: not Path(f"/proc/{orphan}").exists(), "the orphan was reaped")
        story.let_go("after")
        assert process.wait(LIMIT_S) == 0


# -- with a mount


@pytest.fixture
def around(tmp_path: Path, transport: str) -> Iterator[AcpfsMount]:
    """Not mounted; taken down at the end, whatever is there then."""
    (tmp_path / "backing").mkdir()
    mount = AcpfsMount(tmp_path / "backing", tmp_path / "not" / "there" / "yet", transport)
    mount.runtime_dir = tmp_path / "run"
    mount.runtime_dir.mkdir()
    mount.log = tmp_path / "log"
    mount.watch()
    try:
        yield mount
    finally:
        mount.abort()


def words(mount: AcpfsMount, *options: str) -> list[str]:
    transport = mount.transport.partition("-")[0]
    return ["with", str(mount.backing), str(mount.path), "--transport", transport, *options]


@pytest.mark.mount
@pytest.mark.clause("S619")
def test_what_the_command_saves_is_persisted_at_its_end(around: AcpfsMount) -> None:
    script = 'echo saved > "$ACPFS_DIR/step-1.pt"; exit 3'
    options = ["--ram", "64M", "--prefault", "0"]
    done = around.run("acpfs", *words(around, *options), "--", "sh", "-c", script, check=False)
    assert done.returncode == 3, done.stderr
    assert (around.backing / "step-1.pt").read_text() == "saved\n"
    assert not is_mounted(around.path)


@pytest.mark.mount
@pytest.mark.clause("S619")
def test_what_is_not_persisted_in_time_stays_mounted(around: AcpfsMount) -> None:
    script = 'head -c 4000000 /dev/urandom > "$ACPFS_DIR/step-1.pt"'
    options = ["--ram", "64M", "--prefault", "0", "--bandwidth", "4K", "--drain-timeout", "1"]
    done = around.run("acpfs", *words(around, *options), "--", "sh", "-c", script, check=False)
    assert done.returncode == 1, done.stderr
    assert f"{around.path} stays mounted" in done.stderr
    assert is_mounted(around.path)
    assert (around.path / "step-1.pt").stat().st_size == 4_000_000


@pytest.mark.mount
@pytest.mark.transports("native")
@pytest.mark.clause("S619")
def test_its_own_settings_are_in_front_of_the_command(around: AcpfsMount) -> None:
    """And the command's are behind."""
    done = around.run("acpfs", *words(around), "--ram", "64M", check=False)
    assert done.returncode == 2
    assert "behind --" in done.stderr
    done = around.run("acpfs", *words(around), "--rum", "64M", "--", "true", check=False)
    assert done.returncode == 2
    done = around.run("acpfs", *words(around), "--ram", "many", "--", "true", check=False)
    assert done.returncode == 2
    assert not around.path.exists()
    options = ["--ram", "64M", "--prefault", "0"]
    echoes = ["sh", "-c", 'echo "$@" > "$ACPFS_DIR/options"', "sh", "--ram", "1", "--", "x"]
    assert around.run("acpfs", *words(around, *options), "--", *echoes).returncode == 0
    assert (around.backing / "options").read_text() == "--ram 1 -- x\n"


@contextmanager
def begun_around(around: AcpfsMount, script: str) -> Iterator[subprocess.Popen[bytes]]:
    """`acpfs with` in a process group of its own, as a shell starts it; its command is `script`."""
    options = ["--ram", "64M", "--prefault", "0"]
    program = [sys.executable, "-c", AS_IN_FRONT, *words(around, *options), "--"]
    with subprocess.Popen(
        [*program, "sh", "-c", script],
        env={**os.environ, "ACPFS_RUNTIME_DIR": str(around.runtime_dir)},
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.mount
@pytest.mark.transports("native", "libfuse")
@pytest.mark.clause("S619")
@pytest.mark.parametrize("moment", ["starts", "is mounted", "runs"])
def test_a_key_that_ends_all_leaves_no_mount_whenever_it_comes(
    around: AcpfsMount, moment: str
) -> None:
    """The terminal tells each of the processes: mount, and the command."""
    runs = around.backing / "runs"
    with begun_around(around, f"touch {runs}; while :; do sleep 0.05; done") as process:
        seen = {
            "starts": lambda: any(around.runtime_dir.iterdir()),
            "is mounted": lambda: is_mounted(around.path),
            "runs": runs.exists,
        }
        until(seen[moment], f"it {moment}")
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(LIMIT_S) != 0
    until(lambda: not is_mounted(around.path), "the end of the mount")


@pytest.mark.mount
@pytest.mark.transports("native")
@pytest.mark.clause("S619")
def test_where_it_is_killed_itself_the_mount_goes_on(around: AcpfsMount) -> None:
    """Nobody waits then, and nothing that was saved is lost."""
    script = 'echo saved > "$ACPFS_DIR/step-1.pt"; kill -9 $PPID'
    with begun_around(around, script) as process:
        assert process.wait(LIMIT_S) == -signal.SIGKILL
    assert is_mounted(around.path)
    around.flush()
    assert (around.backing / "step-1.pt").read_text() == "saved\n"
