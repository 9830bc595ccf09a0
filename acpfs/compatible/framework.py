"""The functions behind `mindio_ttp.framework_ttp` and `.controller_ttp`: one job per process, as
there.

Without `enable_arf` a fault ends in a checkpoint of the newest step for which survivors are a
cover, and the end of the job. With it ranks are replaced or repaired, and the job goes on
(`going_on`). What the product would do beside that is refused where it is asked for.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from acpfs.compatible import controller, product_log
from acpfs.compatible.c_library import EntryPoints, built
from acpfs.compatible.going_on import GoingOn
from acpfs.compatible.handlers import Event, Handlers
from acpfs.compatible.processor import Processor, RepairAs
from acpfs.compatible.product_values import (
    FAULT_TEXTS,
    MINDX_ACTIONS,
    STOPPING_FIRST,
    WORLD_MAX,
    Action,
    ReportState,
)
from acpfs.compatible.refusal import UnsupportedError
from acpfs.compatible.replicas import holders_of
from acpfs.compatible.update_marks import UpdateMarks
from acpfs.errors import ConfigError, MachineError, RefusedError
from acpfs.logger import get_logger
from acpfs.training.guard import Guard, OnPurposeError
from acpfs.training.messages import TroubleKind
from acpfs.training.policy import Policy

log = get_logger("acpfs.compatible")
OK = 0
ERROR = 1
REPORT_S = 180.0
"""So long a rank that has reported an unknown error waits for the end of the job, as in the
product.
"""
NOT_RESUMED = (
    "acpfs leaves a checkpoint and ends the job, or goes on with enable_arf=True; it does not do "
    "this"
)
GENERATION_VARIABLE = "ACPFS_GENERATION"
"""Above 0 in a process that takes another one's place: `acpfs-run --on-fault replace` sets it."""
TROUBLE = {
    ReportState.RS_UCE: TroubleKind.MEMORY,
    ReportState.RS_UCE_CORRUPTED: TroubleKind.MEMORY,
    ReportState.RS_HCCL_FAILED: TroubleKind.COLLECTIVE,
    ReportState.RS_UNKNOWN: TroubleKind.ERROR,
}


class NotBegunError(OnPurposeError, RefusedError):
    """Called before the processor was begun."""


class JobOverError(OnPurposeError, RefusedError):
    """This rank's train function has ended, and the job goes on nowhere."""


class _Next(Enum):
    """Behind an exception of the train function."""

    AGAIN = "run it again"
    RAISE = "let the exception pass"
    OVER = "all is done"


class _Job:
    """What this process is in."""

    def __init__(self) -> None:
        self.handlers = Handlers(for_mindspore="mindspore" in sys.modules)
        self.patterns: list[tuple[str, ReportState, Callable[[str], str]]] = []
        self.processor: Processor | None = None
        self.rank = -1
        self.tls = False
        self.init: tuple[int, int, bool] | None = None
        """Of the processor: rank, world, TLS; between `tft_init_processor` and
        `tft_start_processor`.
        """
        self.goes_on = False
        """`enable_arf`, of the controller or of the processor."""
        self.marks: UpdateMarks | None = None
        self.controller_ready = False
        self.controller_runs = False
        self.guard = Guard()
        self.guard.at_end.append(self._switch_off)

    def _switch_off(self, why: str) -> None:
        if self.processor is not None:
            self.processor.switch_off(why)

    def begun(self) -> tuple[Processor, UpdateMarks]:
        if self.processor is None or self.marks is None:
            raise NotBegunError("tft_init_processor and tft_start_processor come first")
        return self.processor, self.marks


_job = _Job()


# -- controller


def tft_init_controller(
    rank: int,
    world_size: int,
    enable_local_copy: bool,
    enable_arf: bool = False,
    enable_zit: bool = False,
) -> None:
    _check_world(rank, world_size, -1)
    _refuse_switches(enable_local_copy, enable_zit)
    product_log.begin()
    _job.controller_ready = True
    _job.goes_on = enable_arf


def tft_start_controller(
    bind_ip: str, port: int, enable_tls: bool = True, tls_info: str = ""
) -> None:
    if not _job.controller_ready:
        raise RefusedError("tft_init_controller comes before tft_start_controller")
    controller.no_own_certificates(tls_info)
    controller.start_controller(
        *controller.checked_address(bind_ip, port),
        enable_tls,
        Policy.from_environment(),
        replaces=_job.goes_on,
    )
    _job.controller_runs = True


def tft_destroy_controller() -> None:
    """It ends when the last rank has left."""
    _job.controller_runs = False


# -- processor


def tft_init_processor(
    rank: int,
    world_size: int,
    enable_local_copy: bool,
    enable_tls: bool = True,
    tls_info: str = "",
    enable_uce: bool = True,
    enable_arf: bool = False,
    enable_zit: bool = False,
) -> None:
    _check_world(rank, world_size, 0)
    _refuse_switches(enable_local_copy, enable_zit)
    controller.no_own_certificates(tls_info)
    product_log.begin()
    _job.goes_on = enable_arf
    _job.handlers.goes_on = enable_arf
    if enable_uce and not enable_arf:
        log.info("a rank whose device loses memory is in no cover; it is not repaired")
    _job.handlers.for_mindspore = "mindspore" in sys.modules
    _job.marks = UpdateMarks(_entry_points() if _job.handlers.for_mindspore else None)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _note_signal)
    _job.rank = rank
    _job.init = (rank, world_size, enable_tls)


def _note_signal(*_: object) -> None:
    _job.guard.ours(log.warning, "a signal does not end this rank: the controller does")


def _entry_points() -> EntryPoints:
    """Without them nobody would know of an update that is under way, and a torn state could be
    saved.
    """
    try:
        return EntryPoints(built()[0])
    except (MachineError, OSError) as error:
        raise RefusedError(
            f"MindSpore's runtime cannot say when an update begins: {error}; begin a processor "
            "once as a user who may write there, with cc"
        ) from error


def tft_start_processor(master_ip: str, port: int, local_ip: str = "") -> None:
    if _job.init is None or _job.marks is None:
        raise RefusedError("tft_init_processor comes before tft_start_processor")
    if local_ip:
        controller.checked_address(local_ip, port)
    rank, world, tls = _job.init
    host, port = controller.checked_address(master_ip, port)
    policy = Policy.from_environment()
    credentials = controller.credentials_for(port, tls)
    known = (rank, world, controller.job_name(port), credentials, _job.marks, _job.handlers, policy)
    rebooted = int(os.environ.get(GENERATION_VARIABLE, "0")) > 0
    processor = GoingOn(*known, rebooted=rebooted) if _job.goes_on else Processor(*known)
    processor.follow(_job.guard.failed)
    processor.start(host, port)
    _job.processor = processor


def tft_destroy_processor() -> None:
    processor = _job.processor
    if processor is not None and not _job.guard.last(processor.end):
        _job.guard.last(processor.switch_off, "its end failed")


def tft_set_optimizer_replica(rank: int, replica_info: list[dict[str, Any]]) -> None:
    """The rank registers: all ranks have to come here before one of them dies."""
    processor, _marks = _job.begun()
    processor.register(holders_of(rank, replica_info), controller.node_name())


def tft_set_dp_group_info(rank: int, dp_rank_list: Any) -> None:
    if (
        rank < 0
        or not isinstance(dp_rank_list, list)
        or not all(isinstance(one, int) for one in dp_rank_list)
    ):
        raise ConfigError(
            f"set_dp_group_info input params invalid, rank:{rank}, dp_rank_list:{dp_rank_list}"
        )


# -- steps


def tft_start_updating_os(backup_step: int = -1) -> None:
    if backup_step != -1:
        raise UnsupportedError(
            f"backup_step = {backup_step}: copies of the state before an update are not kept; "
            "replicas are asked"
        )
    _job.guard.ours(_begin_update)


def _begin_update() -> None:
    _, marks = _job.begun()
    marks.begin_update()


def tft_end_updating_os(step: int) -> None:
    if step < 1:
        raise ConfigError(f"step {step}: 1 or more")
    _job.guard.ours(_end_update, step)


def _end_update(step: int) -> None:
    processor, marks = _job.begun()
    marks.end_update(step)
    processor.updated()


def tft_start_copy_os() -> None:
    raise UnsupportedError(
        "tft_start_copy_os: copies of the state before an update are not kept; replicas are asked"
    )


def tft_set_step_args(args: Any) -> None:
    if args is not None and _job.handlers.framework not in STOPPING_FIRST:
        _job.handlers.args = args


def tft_reset_limit_step() -> None:
    """There is no limit: a step that is to be the last one ends by `tft_start_updating_os`."""


def tft_pause_train(cur_step: int) -> None:
    """Nobody asks for a pause: `tft_notify_controller_stop_train(…, "pause")` says that it
    failed.
    """
    if cur_step < 0:
        raise ConfigError(f"pause train failed, cur_step: {cur_step} invalid!")


def tft_report_load_ckpt_step(step: int) -> None:
    raise UnsupportedError(f"tft_report_load_ckpt_step({step}): {NOT_RESUMED}")


# -- what a framework registers


def register_handler(event: Event, func: Callable[..., Any], ctx: Any) -> None:
    """The thirteen functions of `tft_register_…_handler`."""
    _job.handlers.register(event, func, ctx)


def tft_register_decrypt_handler(decryptor: Callable[[str], str] | None) -> None:
    if decryptor is not None:
        raise UnsupportedError(
            "tft_register_decrypt_handler: the job's key has no password; it is readable for "
            "this user only"
        )


def tft_register_exception_handler(
    fault_pattern: str, fault_type: str, fault_handle: Callable[[str], str]
) -> None:
    if fault_type not in ReportState.__members__ or not callable(fault_handle):
        raise ConfigError(
            f"{fault_type!r} with {fault_handle!r}: a name of ReportState, and what makes a text "
            "of an exception's"
        )
    _job.patterns.append((fault_pattern, ReportState[fault_type], fault_handle))


def set_mindio_export_version(framework_type: str) -> None:
    if framework_type not in STOPPING_FIRST:
        raise ConfigError(f"This framework: {framework_type} is not supported by mindio tft now.")
    _job.handlers.framework = framework_type


def get_mindio_export_version() -> str | None:
    return _job.handlers.framework


def get_device() -> Any:
    raise UnsupportedError(
        "get_device: acpfs does not know the rank's NPU; ask torch.npu.current_device()"
    )


# -- a fault


def tft_report_error(error_type: int, error_code: str = "") -> None:
    try:
        state = ReportState(error_type)
    except ValueError as error:
        raise ConfigError(f"error type {error_type}: a value of ReportState") from error
    _job.guard.ours(_report, state, error_code)


def _report(state: ReportState, error_code: str) -> None:
    processor, _marks = _job.begun()
    if state is ReportState.RS_NORMAL:
        processor.report_stopped()
    elif state in (ReportState.RS_INIT_FINISH, ReportState.RS_PREREPAIR_FINISH) and isinstance(
        processor, GoingOn
    ):
        if state is ReportState.RS_PREREPAIR_FINISH:
            processor.prepared()
    elif state is ReportState.RS_UNKNOWN and isinstance(processor, GoingOn):
        log.error(
            "an error that nobody knows ends this process, and another one takes its place",
            text=error_code,
        )
    elif state not in TROUBLE:
        raise UnsupportedError(f"{state.name}: {NOT_RESUMED}")
    elif (
        processor.report_trouble(TROUBLE[state], error_code or state.name)
        and state is ReportState.RS_UNKNOWN
    ):
        processor.wait_over(REPORT_S)


def tft_wait_next_action() -> int:
    """`Action.EXIT`, when the job is at its end; `Action.RETRY`, with `enable_arf`, when every rank
    has the state of one step again.
    """
    action = _job.guard.ours(_wait_action)
    return (Action.EXIT if action is None else action).value


def _wait_action() -> Action:
    return _job.begun()[0].wait_action()


def tft_get_repair_step() -> int:
    """Where the job goes on; 0: nothing was repaired."""
    return _job.processor.repair_step if isinstance(_job.processor, GoingOn) else 0


def tft_get_repair_type() -> str:
    return (RepairAs.UNKNOWN if _job.processor is None else _job.processor.repair_as).value


def tft_is_reboot_node() -> bool:
    """Whether this process takes the place of another one; with `enable_arf` only."""
    return isinstance(_job.processor, GoingOn) and _job.processor.rebooted


def tft_get_reboot_type() -> str:
    if not tft_is_reboot_node():
        raise UnsupportedError("tft_get_reboot_type: this process takes the place of no other one")
    return "arf"


def tft_exception_handler(func: Callable[..., Any]) -> Callable[..., Any]:
    """Around a framework's train function: an exception is reported, and the rank waits for what
    its fault leads to.
    """
    if not callable(func):
        raise TypeError("func must be a callable")

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _job.handlers.args = args if _job.handlers.framework in STOPPING_FIRST else list(args)
        while True:
            try:
                result = func(*args, **kwargs)
            except (KeyboardInterrupt, SystemExit, GeneratorExit):
                raise
            except BaseException as error:  # torch's CheckpointException is no Exception
                came = _job.guard.ours(_came_of, error)
                if came is _Next.AGAIN:
                    continue
                if came is not _Next.OVER:
                    raise
                result = None
                break
            if not _job.guard.ours(_goes_again):
                break
        tft_destroy_processor()
        tft_destroy_controller()
        return result

    return wrapper


def _goes_again() -> bool:
    """The train function has ended; whether it is to run again, for the sake of another rank.

    Raises:
        JobOverError: another rank needs what this one has, and the job goes on nowhere.
    """
    if _job.processor is None or _job.processor.finish():
        return False
    if tft_wait_next_action() != Action.RETRY.value:
        raise JobOverError("the job is over: no copy of a shard is left, or nobody commands")
    return not _job.guard.is_off


def _came_of(error: BaseException) -> _Next:
    """Report it; what is to be done."""
    if _job.processor is None:
        return _Next.RAISE
    if _goes_on(error):
        return _Next.AGAIN
    # the process before this one may have died behind the last step, before it had left
    return _Next.OVER if _job.processor.is_done else _Next.RAISE


def _goes_on(error: BaseException) -> bool:
    """Report it; whether the train function is to run again."""
    text = str(error)
    for pattern, state, handle in _job.patterns:
        if pattern in text:
            return _reported(state, handle(text))
    known = [
        state
        for part, state in FAULT_TEXTS.items()
        if part in text and isinstance(error, RuntimeError)
    ]
    return _reported(
        known[0] if known else ReportState.RS_UNKNOWN, f"{type(error).__name__}: {text}"
    )


def _reported(state: ReportState, text: str) -> bool:
    """Tell it, and wait for what comes of it; whether the train function is to run again."""
    log.error("the train function ended", state=state.name, text=text)
    tft_report_error(state.value, text)
    if state is ReportState.RS_UNKNOWN:
        return False
    if tft_wait_next_action() == Action.RETRY.value:
        return True
    if not (_job.guard.is_off or (_job.processor and _job.processor.is_done)):
        time.sleep(REPORT_S)  # the processor's thread ends the process
    return False


# -- the cluster's agent


def tft_register_mindx_callback(action: str, func: Callable[..., Any]) -> int:
    if action not in MINDX_ACTIONS or not callable(func):
        log.error(
            "tft_register_mindx_callback",
            why=f"{action!r}: one of {', '.join(MINDX_ACTIONS)}, and a function",
        )
        return ERROR
    log.info(
        "registered, and never called: the controller decides by itself, and asks no agent of "
        "the cluster",
        action=action,
    )
    return OK


def tft_notify_controller_dump() -> int:
    """A fault with nobody lost: all save and end. Asked in a rank's process."""
    if _job.processor is None or not _job.processor.registered:
        log.error(
            "tft_notify_controller_dump", why="no rank of the job is registered in this process"
        )
        return ERROR
    return (
        OK
        if _job.processor.report_trouble(TroubleKind.ERROR, "a checkpoint was asked for")
        else ERROR
    )


def tft_notify_controller_stop_train(
    fault_ranks: dict[int, int], stop_type: str = "stop", timeout: int | None = None
) -> int:
    return _not_from_outside("tft_notify_controller_stop_train")


def tft_notify_controller_on_global_rank(fault_ranks: dict[int, int], time: int = 1) -> int:
    return _not_from_outside("tft_notify_controller_on_global_rank")


def tft_notify_controller_prepare_action(
    action: str, fault_ranks: dict[int, int] | None = None
) -> int:
    return _not_from_outside("tft_notify_controller_prepare_action")


def tft_notify_controller_change_strategy(strategy: str, params: str = "") -> int:
    return (
        tft_notify_controller_dump()
        if strategy == "dump"
        else _not_from_outside("tft_notify_controller_change_strategy")
    )


def _not_from_outside(name: str) -> int:
    log.error(
        name,
        why=(
            "the controller sees by itself which ranks are lost, and what it does about it is a "
            "checkpoint"
        ),
    )
    return ERROR


def tft_query_high_availability_switch() -> bool:
    return _job.controller_runs


def _check_world(rank: int, world: int, lowest: int) -> None:
    if not 1 <= world <= WORLD_MAX or not lowest <= rank < world:
        raise ConfigError(f"rank {rank} of {world}: out of range")


def _refuse_switches(local_copy: bool, zit: bool) -> None:
    refused: Sequence[tuple[str, bool]] = (("enable_local_copy", local_copy), ("enable_zit", zit))
    if names := [name for name, on in refused if on]:
        raise UnsupportedError(f"{', '.join(names)}: {NOT_RESUMED}")
