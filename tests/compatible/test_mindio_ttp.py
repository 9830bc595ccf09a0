"""`mindio_ttp` without a job: names, refusals, who holds what, marks of an update in Python and in
C.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from acpfs.compatible import framework
from acpfs.compatible.c_library import C_API, FRAMEWORK, EntryPoints, built
from acpfs.compatible.controller import checked_address, credentials_for, job_name
from acpfs.compatible.handlers import Event, Handlers
from acpfs.compatible.places import SITE
from acpfs.compatible.refusal import UnsupportedError
from acpfs.compatible.replicas import holders_of, save_info
from acpfs.compatible.update_marks import UpdateMarks
from acpfs.errors import ConfigError, MachineError, RefusedError
from acpfs.training.marks import Mark
from acpfs.training.messages import Phase
from tests.compatible import product_names
from tests.compatible.conftest import signature
from tests.rig.namespaces import namespace

clause = pytest.mark.clause
Product = Callable[[str], ModuleType]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that is in no job."""
    monkeypatch.setattr(framework, "_job", framework._Job())
    monkeypatch.setenv("TTP_LOG_PATH", str(tmp_path / "logs"))
    monkeypatch.setattr("acpfs.compatible.product_log.begin", lambda: None)
    for name in ("ACPFS_MINDIO_DIRECTORY", "MINDX_TASK_ID", "TTP_STOP_CLEAN_BEFORE_DUMP"):
        monkeypatch.delenv(name, raising=False)


@clause("T96")
@pytest.mark.parametrize("module", product_names.TTP)
def test_names_and_signatures_are_the_products(product: Product, module: str) -> None:
    found = product(module)
    names = product_names.TTP[module]
    assert {name: signature(getattr(found, name)) for name in names} == names
    functions = {
        name for name in found.__all__ if not isinstance(getattr(found, name), type | ModuleType)
    }
    assert functions == set(names)


@clause("T96")
def test_enumerations_and_the_log(product: Product) -> None:
    ttp = product("mindio_ttp.framework_ttp")
    for name, values in product_names.ENUMERATIONS.items():
        assert {member.name: member.value for member in getattr(ttp, name)} == values
    assert product("mindio_ttp.controller_ttp").ttp_logger.LOGGER.name == "mindio_ttp"


REFUSED: list[tuple[str, str, tuple[Any, ...], str]] = [
    ("framework_ttp", "tft_init_controller", (0, 2, False, False, True), "enable_zit"),
    ("framework_ttp", "tft_init_processor", (0, 2, True), "enable_local_copy"),
    ("framework_ttp", "tft_init_processor", (0, 2, False, False, "tlsCert: a"), "leave it empty"),
    ("framework_ttp", "tft_start_updating_os", (7,), "backup_step = 7"),
    ("framework_ttp", "tft_start_copy_os", (), "replicas are asked"),
    ("framework_ttp", "tft_report_load_ckpt_step", (4,), "does not do this"),
    ("framework_ttp", "tft_get_reboot_type", (), "takes the place"),
    ("framework_ttp", "tft_register_decrypt_handler", (str,), "no password"),
    ("framework_ttp.ttp_decorator", "get_device", (), "torch.npu.current_device"),
    ("utils", "tft_set_update_start_time", (), "device's own time"),
    ("utils", "tft_set_update_end_time", (), "device's own time"),
    *(
        ("adaptor", name, (None,) * (text.count(",") + 1), "num-distributed-optimizer-instances")
        for name, text in product_names.ADAPTOR.items()
        if text
    ),
]


@clause("T96")
@pytest.mark.parametrize(
    ("module", "name", "arguments", "why"), REFUSED, ids=[row[1] for row in REFUSED]
)
def test_what_acpfs_has_not_got_raises_one_sentence(
    product: Product, module: str, name: str, arguments: tuple[Any, ...], why: str
) -> None:
    with pytest.raises(NotImplementedError) as caught:
        getattr(product(f"mindio_ttp.{module}"), name)(*arguments)
    assert isinstance(caught.value, UnsupportedError)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


@clause("T96", "T105")
def test_calls_in_the_wrong_order_and_wrong_values(product: Product) -> None:
    ttp = product("mindio_ttp.framework_ttp")
    agent = product("mindio_ttp.controller_ttp")
    calls: list[tuple[Callable[..., Any], tuple[Any, ...], type[Exception]]] = [
        (ttp.tft_start_controller, ("127.0.0.1", 8000), RefusedError),
        (ttp.tft_start_processor, ("127.0.0.1", 8000), RefusedError),
        (ttp.tft_set_optimizer_replica, (0, []), RefusedError),
        (ttp.tft_end_updating_os, (3,), RefusedError),
        (ttp.tft_wait_next_action, (), RefusedError),
        (ttp.tft_report_error, (0,), RefusedError),
        (ttp.tft_report_error, (99,), ConfigError),
        (ttp.tft_end_updating_os, (0,), ConfigError),
        (ttp.tft_pause_train, (-1,), ConfigError),
        (ttp.tft_init_controller, (2, 2, False), ConfigError),
        (ttp.tft_init_processor, (-1, 2, False), ConfigError),
        (ttp.tft_set_dp_group_info, (0, None), ConfigError),
        (ttp.set_mindio_export_version, ("other",), ConfigError),
        (ttp.tft_register_exception_handler, ("text", "RS_NONE", str), ConfigError),
        (ttp.tft_register_stop_handler, (None,), TypeError),
        (ttp.tft_exception_handler, (None,), TypeError),
    ]
    for function, arguments, kind in calls:
        with pytest.raises(kind):
            function(*arguments)
    failing = [
        agent.tft_notify_controller_dump(),
        agent.tft_notify_controller_stop_train({0: 1}),
        agent.tft_notify_controller_on_global_rank({0: 1}),
        agent.tft_notify_controller_prepare_action("hot switch"),
        agent.tft_notify_controller_change_strategy("retry"),
        agent.tft_notify_controller_change_strategy("dump"),
        agent.tft_register_mindx_callback("other", print),
    ]
    assert failing == [1] * 7
    assert agent.tft_register_mindx_callback("report_result", print) == 0
    assert (
        agent.tft_query_high_availability_switch(),
        ttp.tft_get_repair_type(),
        ttp.tft_get_repair_step(),
    ) == (False, "unknown", 0)


@clause("T105")
def test_addresses_names_and_certificates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert checked_address("localhost", 1024) == ("127.0.0.1", 1024)
    for host, port in (
        ("0.0.0.0", 8000),
        ("127.0.0.1", 80),
        ("127.0.0.1", 65536),
        ("no such host", 8000),
    ):
        with pytest.raises(ConfigError):
            checked_address(host, port)
    with pytest.raises(ConfigError, match="ACPFS_MINDIO_DIRECTORY"):
        credentials_for(8000, tls=True)
    assert credentials_for(8000, tls=False) is None
    monkeypatch.setenv("ACPFS_MINDIO_DIRECTORY", str(tmp_path))
    found = credentials_for(8000, tls=True)
    assert found is not None
    assert found.directory == tmp_path / ".acpfs-job" / "mindio-8000" / "tls"
    monkeypatch.setenv("MINDX_TASK_ID", "task")
    assert job_name(8000) == "task"


def replica(ranks: list[int], copies: int, shift: int = 0) -> dict[str, Any]:
    return {"rank_list": ranks, "replica_cnt": copies, "replica_shift": shift}


@clause("T102")
def test_who_holds_what() -> None:
    group = [1, 3, 5, 7]
    assert [holders_of(rank, [replica(group, 2)]) for rank in group] == [
        {"opt0/rank1": (1, 5)},
        {"opt0/rank3": (3, 7)},
    ] * 2
    assert holders_of(3, [replica(group, 4), replica([3, 2], 2)]) == {
        "opt0/rank1": (1, 3, 5, 7),
        "opt1/rank2": (2, 3),
    }
    assert holders_of(3, [replica(group, 1)]) == {"opt0/rank3": (3,)}
    for wrong in (
        [replica([0], 1)],
        [replica(group, 3)],
        [replica([3, 3], 2)],
        [{"rank_list": group}],
        [replica(group, 0)],
        [],
    ):
        with pytest.raises(ConfigError):
            holders_of(3, wrong)
    with pytest.raises(UnsupportedError, match="replica_shift = 1"):
        holders_of(3, [replica(group, 2, 1)])
    assert save_info({"opt0/rank1": 5, "opt0/rank3": 3, "opt1/rank2": 2}) == [
        {"type": 0, "ranks": [3, 5]},
        {"type": 1, "ranks": [2]},
    ]


@clause("T103")
def test_marks_of_an_update() -> None:
    marks = UpdateMarks()
    assert marks.now == Mark(0, 0, Phase.COMPUTING)
    marks.begin_update()
    assert (marks.now, marks.updating) == (Mark(0, 1, Phase.UPDATING), True)
    marks.end_update(41)
    marks.begin_update()
    marks.hold()
    assert marks.updating
    marks.end_update(42)
    with pytest.raises(RuntimeError, match="FORCE STOP"):
        marks.begin_update()
    assert marks.now == Mark(42, 42, Phase.COMPUTING)


@clause("T106")
def test_the_two_entry_points_of_c(tmp_path: Path) -> None:
    """As MindSpore's runtime opens them: first the one library, then the other, by the package's
    place.
    """
    for part in (FRAMEWORK, C_API):
        (tmp_path / part).parent.mkdir()
    paths = built(tmp_path)
    assert paths == (tmp_path / FRAMEWORK, tmp_path / C_API)
    times = [path.stat().st_mtime_ns for path in paths]
    marks = UpdateMarks(EntryPoints(built(tmp_path)[0]))
    assert [path.stat().st_mtime_ns for path in paths] == times, "built once"
    for path in paths:
        ctypes.CDLL(str(path), mode=os.RTLD_LAZY)
    library = ctypes.CDLL(str(paths[1]), mode=os.RTLD_LAZY)
    begin = library.MindioTtpSetOptimStatusUpdating
    end = library.MindioTtpSetOptimStatusFinished
    begin.argtypes = [ctypes.c_int64]
    end.argtypes = begin.argtypes
    assert (begin(-1), marks.now) == (0, Mark(0, 1, Phase.UPDATING))
    marks.end_update(1)
    assert marks.now == Mark(1, 1, Phase.COMPUTING)
    assert (begin(-1), end(2), end(0), marks.now) == (0, 0, 1, Mark(2, 2, Phase.COMPUTING))
    assert (begin(1), marks.updating) == (1, False)
    assert begin(-1) == 0
    marks.hold()
    assert marks.updating, "an update that is under way ends"
    marks.end_update(3)
    assert (begin(-1), marks.now) == (1, Mark(3, 3, Phase.COMPUTING))


@clause("T106")
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="where MindSpore's runtime looks for it"):
        built(tmp_path / "none")
    assert "mindio_ttp" not in sys.modules


READ_ONLY = """
import sys, types
sys.modules["mindspore"] = types.ModuleType("mindspore")
from mindio_ttp import framework_ttp
try:
    framework_ttp.tft_init_processor(0, 1, False, False)
except RuntimeError as error:
    sys.exit(1)
except Exception as error:
    print(type(error).__name__, error)
"""


@clause("T106")
@pytest.mark.skipif(os.geteuid() != 0, reason="an installation is mounted read-only")
def test_on_a_read_only_installation_a_processor_is_refused_with_a_sentence(tmp_path: Path) -> None:
    """No rank trains whose updates the runtime could not announce."""
    installed = tmp_path / "installed"
    shutil.copytree(
        SITE.parents[1], installed / "acpfs", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    words = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$1" -B -c "$2"'
    command = namespace("sh", "-c", words, str(installed), sys.executable, READ_ONLY)
    environment = {
        **os.environ,
        "PYTHONPATH": str(installed / SITE.relative_to(SITE.parents[2])),
        "TTP_LOG_PATH": str(tmp_path),
    }
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.startswith(
        "RefusedError MindSpore's runtime cannot say when an update begins: "
    )
    assert "where MindSpore's runtime looks for it" in done.stdout
    assert len(done.stdout.splitlines()) == 1


@clause("T96")
def test_times_of_an_update(product: Product) -> None:
    utils = product("mindio_ttp.utils")
    utils.tft_set_update_start_time(100)
    utils.tft_set_update_end_time(200)
    told = [
        utils.tft_can_do_uce_repair(*given)
        for given in ((0,), (50,), (150,), (250,), (150, 160, 170), (165, 160, 170))
    ]
    assert told == [False, False, True, True, False, True]


class CheckpointException(BaseException):
    """torch's own is of this kind, and there is no torch here."""


@clause("T103")
@pytest.mark.parametrize("error", [RuntimeError, CheckpointException])
def test_a_handler_that_fails_is_one_whatever_it_raises(error: type[BaseException]) -> None:
    def fails(*_: Any) -> int:
        raise error("no space left on device")

    handlers = Handlers(for_mindspore=False)
    for event in (Event.SAVE, Event.CLEAN, Event.STOP):
        handlers.register(event, fails, None)
    assert [handlers.save(5, []), handlers.clean(is_uce_error=False), handlers.stop()] == [
        False
    ] * 3
