"""Enumerations and texts that scripts of the product compare with; numbers as its own modules have
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class OptimizerType(Enum):
    """Place in the lists that `tft_set_optimizer_replica` is given."""

    ATTENTION = 0
    MOE = 1


class Action(Enum):
    """What `tft_wait_next_action` gives."""

    RETRY = 0
    EXIT = 1


class ReportState(Enum):
    """What a rank's main thread reports."""

    RS_NORMAL = 0
    RS_UCE = 1
    RS_UCE_CORRUPTED = 2
    RS_HCCL_FAILED = 3
    RS_INIT_FINISH = 4
    RS_PREREPAIR_FINISH = 5
    RS_STEP_FINISH = 6
    RS_UNKNOWN = 7
    RS_RETRY = 8
    """A guess: the product's documents name it and give it no number, and its published sources
    have the eight above only.
    """


class RepairType(Enum):
    """What a repair handler is told; acpfs repairs nothing in this interface."""

    RT_SEND = 0
    RT_UCE_HIGHLEVEL = 1
    RT_UCE_LOWLEVEL = 2
    RT_RECV_REPAIR = 3
    RT_ROLLBACK = 4
    RT_LOAD_CKPT = 5
    RT_LOAD_REBUILD = 6


FAULT_TEXTS: Mapping[str, ReportState] = {
    "FORCE STOP": ReportState.RS_NORMAL,
    "UCE ERROR": ReportState.RS_UCE,
    "HBM MULTI BIT ECC": ReportState.RS_UCE,
    "ARF FINISH": ReportState.RS_PREREPAIR_FINISH,
    "STEP FINISH": ReportState.RS_STEP_FINISH,
    "HCCL OP RETRY FAILED": ReportState.RS_HCCL_FAILED,
    "SUSPECT REMOTE ERROR": ReportState.RS_HCCL_FAILED,
}
"""What a RuntimeError says → what it is."""
WORLD_MAX = 100_000
MINDX_ACTIONS = ("report_fault_ranks", "report_stop_complete", "report_strategies", "report_result")
STOPPING_FIRST = ("MindSpeed", "MindSpeed-LLM")
"""Frameworks whose stop and clean handlers are called before they save."""
