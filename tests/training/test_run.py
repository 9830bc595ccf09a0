"""`acpfs-run` with real processes: small scripts in place of training, so nothing here needs
torch.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from acpfs.control.runtime import ENVIRONMENT_VARIABLE
from acpfs.training.coordinator.exiting import status_of_exiting
from acpfs.training.coordinator.launchers import QUICK_MAX
from acpfs.training.launcher.caches import VARIABLES
from tests.rig.mounts import MakeMount
from tests.training.gasp_job import until

clause = pytest.mark.clause
BOUND_S = 240.0
RANK = """
import os, signal, sys, time
names = ("RANK", "TORCHELASTIC_RESTART_COUNT", "ACPFS_GENERATION")
rank, attempt, generation = (int(os.environ[name]) for name in names)
def until(path):
    while not os.path.exists(path):
        time.sleep(0.01)
def note(word):
    open(f"{word}-{rank}-{attempt}-{generation}.tmp", "w").write(str(os.getpid()))
    os.rename(f"{word}-{rank}-{attempt}-{generation}.tmp", f"{word}-{rank}-{attempt}-{generation}")
"""


class Run:
    """A launcher that runs."""

    def __init__(self, directory: Path, options: str, script: str, **environment: str) -> None:
        self.directory = directory
        (directory / "rank.py").write_text(RANK + script, encoding="utf-8")
        words = [
            sys.executable,
            "-m",
            "acpfs.cli.run",
            "--nproc-per-node",
            "2",
            *options.split(),
            "rank.py",
            "--own_word",
        ]
        self.process = subprocess.Popen(
            words,
            cwd=directory,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ends(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=BOUND_S)
        return self.process.returncode, out, err

    def there(self, *names: str) -> list[int]:
        """The pids in these files, as soon as they are there."""
        deadline = time.monotonic() + BOUND_S
        while True:
            has_ended = (
                self.process.poll() is not None
            )  # asked first: whatever its ranks have written is there then
            if all((self.directory / name).exists() for name in names):
                return [int((self.directory / name).read_text()) for name in names]
            assert time.monotonic() < deadline, sorted(os.listdir(self.directory))
            assert not has_ended, self.process.communicate()
            select.select([], [], [], 0.02)


@clause("T236")
def test_output_that_cannot_be_shown_ends_no_job(tmp_path: Path) -> None:
    """Stdout goes to a file system that is full; the files of the ranks lie on another one."""
    (tmp_path / "rank.py").write_text(f"{RANK}print('said', rank)\nnote('done')\n")
    words = [sys.executable, "-m", "acpfs.cli.run", "--nproc-per-node", "2"]
    options = ["--log-dir", "logs", "--tee", "1"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*words, *options, "rank.py"],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=BOUND_S,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    logs = sorted(tmp_path.glob("logs/*/attempt_0/*/stdout.log"))
    assert [log.read_text() for log in logs] == ["said 0\n", "said 1\n"]


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[list[Run]]:
    found: list[Run] = []
    yield found
    for run in found:
        run.process.kill()
        if run.process.stdout is not None and not run.process.stdout.closed:
            run.process.communicate()


def gone(pid: int) -> None:
    """Returns when that process has ended, whoever its parent is."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            waiting = select.poll()
            waiting.register(descriptor, select.POLLIN)
            assert waiting.poll(BOUND_S * 1000), f"{pid} lives"
        finally:
            os.close(descriptor)


@clause("T65", "T66")
def test_ranks_are_started_as_torchrun_does(tmp_path: Path, begun: list[Run]) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "GROUP_RANK")
    script = f"print({{n: v for n, v in os.environ.items() if n in {names}}}, sys.argv)"
    begun.append(Run(tmp_path, f"-t 3 --log-dir {tmp_path}/logs --rdzv-id x/1", script))
    status, out, err = begun[0].ends()
    assert (status, err) == (0, "")
    wanted = {
        "LOCAL_RANK": "1",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "GROUP_RANK": "0",
    }
    line = next(line for line in out.splitlines() if line.startswith("[default1]:")).removeprefix(
        "[default1]:"
    )
    assert eval(line.partition("} ")[0] + "}") == wanted
    assert line.endswith("['rank.py', '--own_word']")
    kept = sorted(
        path.relative_to(tmp_path / "logs").parts[1:]
        for path in (tmp_path / "logs").rglob("stdout.log")
    )
    assert kept == [("attempt_0", "0", "stdout.log"), ("attempt_0", "1", "stdout.log")]


@clause("T66")
def test_the_status_of_a_rank_and_its_last_lines(tmp_path: Path, begun: list[Run]) -> None:
    begun.append(
        Run(
            tmp_path,
            "-r 2",
            "rank and until('ready-0-0-0')\nrank or note('ready')\nrank and sys.exit('out of "
            "luck')\ntime.sleep(600)",
        )
    )
    status, _, err = begun[0].ends()
    assert status == 1
    assert "rank 1 of this node ended with status 1" in err
    assert "    out of luck" in err


@clause("T66")
def test_a_rank_that_is_killed(tmp_path: Path, begun: list[Run]) -> None:
    begun.append(
        Run(tmp_path, "", "rank and os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)")
    )
    status, _, err = begun[0].ends()
    assert status == 137
    assert "rank 1 was killed by SIGKILL" in err


@clause("T66")
def test_a_program_that_is_not_there(tmp_path: Path, begun: list[Run]) -> None:
    begun.append(Run(tmp_path, "--no-python", ""))
    status, _, err = begun[0].ends()
    assert status == 127
    assert "No such file" in err


@clause("T67")
def test_all_ranks_start_anew(tmp_path: Path, begun: list[Run]) -> None:
    script = """
note('began')
if attempt == 0:
    until('began-0-0-0'); rank and sys.exit(3); time.sleep(600)
"""
    begun.append(Run(tmp_path, "--max-restarts 1", script))
    status, _, _ = begun[0].ends()
    assert status == 0
    assert {path.name for path in tmp_path.glob("began-*")} == {
        "began-0-0-0",
        "began-1-0-0",
        "began-0-1-0",
        "began-1-1-0",
    }


@clause("T67")
def test_who_does_not_hear_sigterm_is_killed_with_all_that_it_began(
    tmp_path: Path, begun: list[Run]
) -> None:
    script = """
if rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = os.fork()
    note('child' if child == 0 else 'deaf')
    time.sleep(600)
until('child-0-0-0'); until('deaf-0-0-0'); sys.exit(5)
"""
    begun.append(Run(tmp_path, "--shutdown-timeout 0.2", script))
    status, _, _ = begun[0].ends()
    assert status == 5
    for name in ("child-0-0-0", "deaf-0-0-0"):
        gone(int((tmp_path / name).read_text()))


@clause("T68")
def test_sigterm_is_a_planned_end(tmp_path: Path, begun: list[Run]) -> None:
    script = (
        "signal.signal(signal.SIGTERM, lambda *_: (note('saved'), os._exit(75)))\nnote('ready')\n"
        "time.sleep(600)"
    )
    begun.append(Run(tmp_path, "--max-restarts 3 --on-fault replace", script))
    begun[0].there("ready-0-0-0", "ready-1-0-0")
    begun[0].process.send_signal(signal.SIGTERM)
    status, _, err = begun[0].ends()
    assert status == 75, err
    assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-0-0-0", "saved-1-0-0"}


@clause("T68")
def test_ranks_of_a_launcher_that_is_killed_get_sigterm(tmp_path: Path, begun: list[Run]) -> None:
    begun.append(
        Run(
            tmp_path,
            "",
            "signal.signal(signal.SIGTERM, lambda *_: (note('told'), os._exit(75)))\n"
            "note('ready')\ntime.sleep(600)",
        )
    )
    pids = begun[0].there("ready-0-0-0", "ready-1-0-0")
    begun[0].process.kill()
    for pid in pids:
        gone(pid)
    assert (tmp_path / "told-0-0-0").exists()
    assert (tmp_path / "told-1-0-0").exists()


@clause("T69")
def test_one_rank_is_replaced(tmp_path: Path, begun: list[Run]) -> None:
    script = "note('ready')\nuntil('end')"
    begun.append(Run(tmp_path, "--on-fault replace", script))
    first, other = begun[0].there("ready-0-0-0", "ready-1-0-0")
    os.kill(other, signal.SIGKILL)
    (second,) = begun[0].there("ready-1-0-1")
    os.kill(first, signal.SIGKILL)
    begun[0].there("ready-0-0-2")
    os.kill(second, 0)  # it has not noticed
    (tmp_path / "end").touch()
    assert begun[0].ends()[0] == 0


@clause("T69")
def test_a_rank_that_dies_when_another_is_through_is_replaced_if_it_did_an_update(
    tmp_path: Path, begun: list[Run]
) -> None:
    script = """
from acpfs.training.first_update import tell_launcher
generation or tell_launcher()
note('ready')
rank and not generation and until('end')
"""
    begun.append(Run(tmp_path, "--on-fault replace", script))
    first, other = begun[0].there("ready-0-0-0", "ready-1-0-0")
    until(lambda: not Path(f"/proc/{first}").exists())  # the launcher has waited for it
    os.kill(other, signal.SIGKILL)
    status, _, err = begun[0].ends()
    assert status == 0, err
    assert (tmp_path / "ready-1-0-1").exists()


@clause("T150")
def test_a_rank_that_did_an_update_between_its_deaths_is_replaced_however_often_it_dies(
    tmp_path: Path, begun: list[Run]
) -> None:
    script = """
from acpfs.training.first_update import tell_launcher
rank == 1 and generation < 9 and tell_launcher()
note('ready')
until('end')
rank == 1 and sys.exit(3)
"""
    begun.append(Run(tmp_path, "--on-fault replace", script))
    for generation in range(9):
        (pid,) = begun[0].there(f"ready-1-0-{generation}")
        os.kill(pid, signal.SIGKILL)
    (tmp_path / "end").touch()  # from here on its processes fail at once
    begun[0].there("ready-1-0-9")
    assert begun[0].ends()[0] == 3
    assert not (tmp_path / f"ready-1-0-{9 + QUICK_MAX + 1}").exists()


@clause("T121")
def test_coordinators_that_ranks_have_left_end_with_the_launcher(
    tmp_path: Path, begun: list[Run]
) -> None:
    """One to which nobody comes would wait for ten minutes, and have a log open in the mount."""
    script = """
import subprocess
words = [sys.executable, '-m', 'acpfs.training.coordinator', '.', '--replace', '--first']
words += ['--tls', 'off', '--job', os.environ['ACPFS_JOB']]
rank and sys.exit(0)
started = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
started.stdout.readline()
open('coordinator', 'w').write(str(started.pid))
os._exit(0)
"""
    begun.append(Run(tmp_path, "", script))
    status, _, err = begun[0].ends()
    assert status == 0, err
    gone(int((tmp_path / "coordinator").read_text()))


@clause("T122")
def test_how_a_process_ends_is_known_before_it_can_be_waited_for() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(3)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert status_of_exiting(pid) == 3 << 8
    os.waitpid(pid, 0)
    assert status_of_exiting(os.getpid()) == 0


@clause("T70")
def test_caches_are_where_they_are_told(tmp_path: Path, begun: list[Run]) -> None:
    script = f"print([os.environ[name] for name in {list(VARIABLES)!r}])"
    begun.append(
        Run(
            tmp_path,
            f"-t 1 --local-ranks-filter 0 --cache {tmp_path}/cache",
            script,
            TRITON_CACHE_DIR="/mine",
        )
    )
    status, out, err = begun[0].ends()
    assert status == 0
    own = [
        str(tmp_path / "cache" / below) if name != "TRITON_CACHE_DIR" else "/mine"
        for name, below in VARIABLES.items()
    ]
    assert out == f"[default0]:{own}\n"
    assert all(Path(path).is_dir() for path in own if path != "/mine")
    assert "not pinned" in err  # no mount here


@pytest.mark.mount
@pytest.mark.transports("native")
@pytest.mark.skipif(
    os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
)
@clause("T70")
def test_what_is_compiled_stays_in_the_ram_of_a_mount(
    tmp_path: Path, make_mount: MakeMount, begun: list[Run]
) -> None:
    """Pinned, so that nothing takes it out, and a job that is started again finds what the one
    before has compiled.
    """
    (tmp_path / "backing").mkdir()
    mount = make_mount(tmp_path / "backing", "native", ram="64M")
    script = """
kernel = os.path.join(os.environ['TRITON_CACHE_DIR'], f'kernel-{rank}')
print('found', os.path.exists(kernel))
open(kernel, 'wb').write(bytes(1 << 20))
"""
    for found in ("False", "True"):
        options = f"-t 1 --local-ranks-filter 0 --cache {mount.path}/cache"
        begun.append(
            Run(tmp_path, options, script, **{ENVIRONMENT_VARIABLE: str(mount.runtime_dir)})
        )
        status, out, err = begun[-1].ends()
        assert (status, out, err) == (0, f"[default0]:found {found}\n", "")
        mount.flush()
        stayed = {
            one["path"]: one["reason"] for one in mount.ask("evict", paths=["cache"])["items"]
        }
        assert stayed == {f"cache/triton/kernel-{rank}": "pinned" for rank in (0, 1)}


HEAVY = "import os\nopen(f'imported-{os.getpid()}', 'w').close()\n"


@pytest.fixture
def heavy(tmp_path: Path) -> dict[str, str]:
    """A module that notes that it is imported, and the variable with which it is found."""
    (tmp_path / "heavy.py").write_text(HEAVY, encoding="utf-8")
    return {
        "PYTHONPATH": os.pathsep.join(
            [str(tmp_path), os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[2])]
        )
    }


@clause("T71")
def test_ranks_and_spares_come_from_one_process_that_has_imported(
    tmp_path: Path, begun: list[Run], heavy: dict[str, str]
) -> None:
    script = """
assert 'heavy' in sys.modules
assert (__name__, sys.argv[1:], sys.path[0]) == ('__main__', ['--own_word'], os.getcwd())
note('ready')
if generation == 0: time.sleep(600 if rank else 0)
else: print('after', generation), sys.exit(0)
"""
    begun.append(
        Run(
            tmp_path,
            "--on-fault replace --spares 1 --template-import heavy -t 1",
            "rank or until('end')\n" + script,
            **heavy,
        )
    )
    (killed,) = begun[0].there("ready-1-0-0")
    os.kill(killed, signal.SIGKILL)
    begun[0].there("ready-1-0-1")
    (tmp_path / "end").touch()
    status, out, err = begun[0].ends()
    assert (status, out) == (0, "[default1]:after 1\n"), err
    assert len(list(tmp_path.glob("imported-*"))) == 1


@clause("T161")
def test_a_spare_s_memory_stays_with_the_rank(
    tmp_path: Path, begun: list[Run], heavy: dict[str, str]
) -> None:
    """The first spare is told at once, and has touched what there was time for; the one that
    replaces it is told when it has all.
    """
    script = (
        "note('ready')\nuntil('end')\nopen(f'has-{rank}-{generation}', "
        "'w').write(open('/proc/self/statm').read())"
    )
    options = "--on-fault replace --spares 1 --spare-memory 64M --template-import heavy"
    begun.append(Run(tmp_path, options, script, **heavy))
    (killed, other) = begun[0].there("ready-1-0-0", "ready-0-0-0")
    children = Path(f"/proc/{begun[0].process.pid}/task/{begun[0].process.pid}/children")
    deadline = time.monotonic() + BOUND_S
    while not any(
        resident(int(pid)) > 64 << 20
        for pid in children.read_text().split()
        if int(pid) not in (killed, other)
    ):
        assert time.monotonic() < deadline
    os.kill(killed, signal.SIGKILL)
    begun[0].there("ready-1-0-1")
    (tmp_path / "end").touch()
    assert begun[0].ends()[0] == 0
    assert (
        int((tmp_path / "has-1-1").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") > 64 << 20
    )


def resident(pid: int) -> int:
    """Bytes of memory that a process has; 0: it is gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


@clause("T71")
def test_a_template_and_a_spare_that_die_are_made_anew(
    tmp_path: Path, begun: list[Run], heavy: dict[str, str]
) -> None:
    begun.append(
        Run(
            tmp_path,
            "--on-fault replace --spares 1 --template-import heavy",
            "note('ready')\nuntil('end')",
            **heavy,
        )
    )
    (killed,) = begun[0].there("ready-1-0-0")
    (template,) = (int(path.name.removeprefix("imported-")) for path in tmp_path.glob("imported-*"))
    children = f"/proc/{begun[0].process.pid}/task/{begun[0].process.pid}/children"
    others = set(map(int, Path(children).read_text().split())) - {
        killed,
        *begun[0].there("ready-0-0-0"),
    }
    for pid in others:
        os.kill(pid, signal.SIGKILL)
    # a spare that is dying can still be told that it is a rank: then the next one takes its place
    for pid in {*others, template}:
        gone(pid)
    os.kill(killed, signal.SIGKILL)
    begun[0].there("ready-1-0-1")
    (tmp_path / "end").touch()
    assert begun[0].ends()[0] == 0


@clause("T71")
def test_where_the_template_fails_ranks_are_executed(tmp_path: Path, begun: list[Run]) -> None:
    begun.append(Run(tmp_path, "--spares 1 --template-import no_such_module", "note('ready')"))
    status, _, err = begun[0].ends()
    assert status == 0
    assert "No module named 'no_such_module'" in err


@clause("T71")
def test_an_environment_that_no_spare_can_be_told_makes_no_spares_for_ever(
    tmp_path: Path, begun: list[Run], heavy: dict[str, str]
) -> None:
    """Linux takes 208 KiB in one message to a process; the same environment can be executed
    with.
    """
    large = {f"LARGE_{number}": "x" * 100_000 for number in range(3)}
    script = "assert len(os.environ['LARGE_2']) == 100_000\nnote('ready')\nuntil('end')"
    begun.append(
        Run(
            tmp_path,
            "--on-fault replace --spares 1 --template-import heavy",
            script,
            **heavy,
            **large,
        )
    )
    (killed, _) = begun[0].there("ready-1-0-0", "ready-0-0-0")
    os.kill(killed, signal.SIGKILL)
    begun[0].there("ready-1-0-1")
    (tmp_path / "end").touch()
    status, _, err = begun[0].ends()
    assert status == 0
    assert err.count("too long for a spare") == 1, err


@clause("T71")
def test_a_forked_rank_s_status_and_the_end_of_its_launcher(
    tmp_path: Path, begun: list[Run], heavy: dict[str, str]
) -> None:
    options = "--spares 1 --template-import heavy -r 3"
    begun.append(
        Run(tmp_path, options, "rank and sys.exit('out of luck')\ntime.sleep(600)", **heavy)
    )
    status, _, err = begun[0].ends()
    assert status == 1
    assert "    out of luck" in err
    script = (
        "signal.signal(signal.SIGTERM, lambda *_: (note('told'), os._exit(75)))\nnote('ready')\n"
        "time.sleep(600)"
    )
    begun.append(Run(tmp_path, options, script, **heavy))
    pids = begun[1].there("ready-0-0-0", "ready-1-0-0")
    begun[1].process.kill()
    for pid in pids:
        gone(pid)
    assert (tmp_path / "told-0-0-0").exists()
