"""Options, markers and fixtures that all tests share; the order in which tests begin.

`--targets` says on what the suites that take a directory run: `plain` (the disk), `tmpfs`,
`libfuse`, `native`, `native-direct`, `native-passthrough` (acpfs by transport and lane), or a path.
Without it each directory of tests has targets of its own, and a test that makes its own mounts runs
on one or two of them: a mount costs most of a second of processor time, and most subjects lie below
the lanes. `--backing` (btrfs, glusterfs, moosefs, cephfs) says what lies below every acpfs.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import trio._core._run as trio_run
from hypothesis import HealthCheck, settings

from tests.rig import lifeline
from tests.rig.faultfs import FaultFs
from tests.rig.mounts import AcpfsMount, MakeMount, mounts_below
from tests.rig.storage.below import Below
from tests.rig.targets import TRANSPORTS, Target, open_target

SUITES = ("conformance", "model", "ordering")
LANES = "libfuse,native-direct,native-passthrough"
TARGETS = dict.fromkeys(SUITES, f"plain,tmpfs,{LANES}")
"""What a directory of tests runs on where `--targets` does not say, by the `target` fixture: one
mount for all tests of a worker.
"""
OWN_MOUNTS = {
    "conformance": "native",
    "model": LANES,
    "ordering": "native-direct,native-passthrough",
    "frameworks": "native",
}
"""The same by the `transport` fixture, with which a test makes its own mounts.

`every_lane` marks where the lanes are the subject.
"""
OTHER_TARGETS = "libfuse"
"""The subject of the others lies below the transports."""
TRANSPORT_NAMES = frozenset(TRANSPORTS)
HAS_FAILED = pytest.StashKey[bool]()
SEED = pytest.StashKey[int]()
trio_run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
"""Tasks that may run take turns in any order, which the seed says, and not only as they came or the
other way round. hypothesis wants it so in each process that imports it: CI's, which collect all
tests, and not those of one directory, where what fails by it never did.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--targets", default=os.environ.get("ACPFS_TEST_TARGETS"), help="see above")
    parser.addoption(
        "--backing",
        default=os.environ.get("ACPFS_TEST_BACKING"),
        help="below all mounts of acpfs; default: the disk",
    )
    parser.addoption(
        "--seed",
        type=int,
        default=os.environ.get("ACPFS_TEST_SEED"),
        help="seed of the random tests; printed when they fail",
    )
    parser.addoption(
        "--ops",
        type=int,
        default=None,
        help="operations per run of the random tests; each has its own default",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "clause(*ids): clauses of docs/internals/clauses that the test holds acpfs to"
    )
    config.addinivalue_line("markers", "random: has a seed; set by itself")
    config.addinivalue_line(
        "markers", "transports(*names): what the `transport` fixture is, whatever --targets says"
    )
    config.addinivalue_line(
        "markers",
        "every_lane: the `transport` fixture is each transport and lane, where --targets does "
        "not say",
    )
    # hypothesis has limits in time, for an example and for its making: a machine that stands still
    # for a moment exceeds them
    with_a_seed = config.getoption("--seed") is not None
    settings.register_profile(
        "acpfs",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize=with_a_seed,
    )
    settings.load_profile("acpfs")
    if not hasattr(config, "workerinput"):  # xdist's: those tell the process that has started them
        config.pluginmanager.register(FailuresAtOnce(config))


class FailuresAtOnce:
    """Says which test has failed, and why in a line, when it does: a run that is ended before its
    time, or looked at, names it, too.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and reporter is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            said = report.longreprtext.strip() if crash is None else crash.message
            why = said.partition("\n")[0]
            reporter.write(f"\nfailed at {report.when}: {report.nodeid}: {why}\n", red=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[HAS_FAILED] = True
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """What a failed test left open is collected here, unheard: a later test would be blamed for it,
    since warnings are errors.
    """
    done = yield
    if item.stash.get(HAS_FAILED, False):
        for name in (
            "last_type",
            "last_value",
            "last_traceback",
            "last_exc",
        ):  # its frames, for a debugger
            vars(sys).pop(name, None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
    return done


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    given = item.config.getoption("--seed")
    seed = int.from_bytes(os.urandom(4), "big") if given is None else int(given)
    item.stash[SEED] = seed
    trio_run._r.seed(f"{seed} {item.nodeid}")
    item.add_report_section(
        "setup",
        "seed",
        f"of random tests, and of the order of trio's tasks: again with --seed={seed}",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    for item in items:
        if "seed" in getattr(item, "fixturenames", ()):
            item.add_marker("random")
        if _makes_a_mount(item):
            item.add_marker("mount")
    yield  # what -m leaves out goes, and what shares a fixture comes together
    items[:] = slow_first(items, getattr(config, "workerinput", {}).get("workercount", 1))


def slow_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """The order in which checks and what is marked `slow` begin first, so that none of it is what
    all others wait for at the end.

    xdist's `worksteal` gives each worker a run of neighbours to begin with, and moves only what
    stands at a run's end. So the slow ones stand at the beginning of each run, in turns; the others
    stay neighbours, since they share mounts.
    """
    slow = [item for item in items if _is_slow(item)]
    others = [item for item in items if not _is_slow(item)]
    ordered: list[pytest.Item] = []
    for worker in range(workers):
        mine = slow[worker::workers]
        count = max(0, (len(items) - len(ordered)) // (workers - worker) - len(mine))
        ordered += mine + others[:count]
        del others[:count]
    return ordered + others


def _is_slow(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) is not None for name in ("check", "slow"))


def _makes_a_mount(item: pytest.Item) -> bool:
    """Whether a test says so by its fixtures or by what it is run on."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    return "make_mount" in getattr(item, "fixturenames", ()) or not TRANSPORT_NAMES.isdisjoint(
        map(str, parameters.values())
    )


def _usable(target: str) -> str | None:
    """Why a target cannot be used here, or None."""
    if target not in TRANSPORTS:
        return None
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "needs /dev/fuse"
    if os.geteuid() != 0:
        return "needs root"
    if importlib.util.find_spec("acpfs.cli.main") is None:
        return "needs the acpfs command"
    return None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "target" in metafunc.fixturenames:
        metafunc.parametrize(
            "target",
            [_parameter(t) for t in _targets(metafunc, TARGETS)],
            indirect=True,
            scope="session",
        )
    if "transport" in metafunc.fixturenames:
        named = metafunc.definition.get_closest_marker("transports")
        transports = [
            t
            for t in (named.args if named is not None else _targets(metafunc, OWN_MOUNTS))
            if t in TRANSPORTS
        ] or ["libfuse"]
        metafunc.parametrize("transport", [_parameter(t) for t in transports], scope="session")


def _targets(metafunc: pytest.Metafunc, defaults: dict[str, str]) -> list[str]:
    chosen: str | None = metafunc.config.getoption("--targets")
    if (
        chosen is None
        and defaults is OWN_MOUNTS
        and metafunc.definition.get_closest_marker("every_lane") is not None
    ):
        chosen = LANES
    directory = metafunc.definition.path.relative_to(Path(__file__).parent).parts[0]
    return (chosen or defaults.get(directory, OTHER_TARGETS)).split(",")


def _parameter(target: str) -> object:
    why_not = _usable(target)
    marks = [pytest.mark.skip(reason=why_not)] if why_not else []
    return pytest.param(target, id=target.strip("/").replace("/", "-"), marks=marks)


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """A directory on one of the file systems under test; not below pytest's own directory, which
    other users may not enter.
    """
    base = Path(tempfile.mkdtemp(prefix="acpfs-target-"))
    base.chmod(0o755)
    lifeline.arm(base)
    try:
        with open_target(request.param, base) as opened:
            yield opened
    finally:
        left = _unmount_below(base)
        shutil.rmtree(base, ignore_errors=True)
    laid = base / "backing"  # with `--backing`, which takes all of its own away at the end
    left = [path for path in left if AcpfsMount.lay_backing is None or path != laid]
    assert not left, f"mounts left behind: {left}"


@pytest.fixture
def make_mount(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[MakeMount]:
    """Make acpfs mounts that are taken down at the end; `make_mount(backing, transport, name=…,
    **options)`, started already.
    """
    if "fault_fs" in request.fixturenames:
        request.getfixturevalue(
            "fault_fs"
        )  # made first, so that it is taken down after the mounts that lie over it
    made: list[AcpfsMount] = []
    with ExitStack() as stack:

        def make(backing: Path, transport: str, name: str = "mnt", **options: Any) -> AcpfsMount:
            mount = AcpfsMount(backing, tmp_path / name, transport, **options)
            made.append(mount)
            return stack.enter_context(mount)

        yield make
        if request.node.stash.get(HAS_FAILED, False):
            for mount in made:
                mount.show_logs()


@pytest.fixture
def fault_fs(tmp_path: Path) -> Iterator[FaultFs]:
    """A faulty backing file system with a journal, no faults yet."""
    with FaultFs(tmp_path / "disk", tmp_path / "backing", record=tmp_path / "journal") as faulty:
        yield faulty


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Seed of this run; in the output of a test that fails."""
    return request.node.stash[SEED]  # type: ignore[no-any-return]


@pytest.fixture(scope="session", autouse=True)
def _backing_elsewhere(request: pytest.FixtureRequest, _no_mounts_left: None) -> Iterator[None]:
    kind = request.config.getoption("--backing")
    if kind is None:
        yield
        return
    with Below(kind) as below:
        AcpfsMount.lay_backing = below.lay
        yield
        AcpfsMount.lay_backing = None


@pytest.fixture(scope="session", autouse=True)
def _no_mounts_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """At the end of the session no mount below this session's own directory is left, even if the
    session is killed.
    """
    base = tmp_path_factory.getbasetemp().resolve()
    for directory in (base, *base.parents):
        if directory.name.startswith(("pytest-", "popen-")):
            directory.chmod(0o755)  # tests become other users, who must get through
    lifeline.arm(base)
    yield
    left = _unmount_below(base)
    assert not left, f"mounts left behind: {left}"


def _unmount_below(base: Path) -> list[Path]:
    """Take away the mounts that should not be there; returns which."""
    left = mounts_below(base)
    for path in left:
        subprocess.run(["umount", "-l", str(path)], check=False, timeout=60)
    lifeline.disarm(base)
    return left
