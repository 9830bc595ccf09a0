"""What works with what, and which tests say so: the table of docs/TRAINING.md.

    python -m tests.training.works_with_what

writes it there; `test_works_with_what.py` fails while the page says something else, or a test that
is named here is not there. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "TRAINING.md"
HEADING = "## What works with what"
COLUMNS = ("", "`protect`", "`resilient`", "`protect`, accelerator", "`resilient`, accelerator")
RUNS = "runs"
DOUBLE = "double"
NOT_TRIED = "not tried"
SAME = "the same"
NO_WAY = "–"
"""There is none: the framework keeps the loop."""


@dataclass(frozen=True)
class Row:
    """A layout, a framework, or a way to update."""

    what: str
    cells: tuple[str, str, str, str]
    tests: tuple[str, ...]
    """At least one for each kind of cell that says that it runs, or is refused."""
    kinds: tuple[str, ...] = ()
    """Of `tests/training/ranks/behind.py`: what ran on the double."""


def _plain(what: str, *tests: str, kinds: tuple[str, ...] = ()) -> Row:
    """What runs wherever plain torch does."""
    double = DOUBLE if kinds else NOT_TRIED
    return Row(what, (RUNS, RUNS, double, double), tests, kinds)


def _update(what: str, *kinds: str, tests: tuple[str, ...] = ()) -> Row:
    """A way to update, with DDP or HSDP."""
    return Row(what, (RUNS, RUNS, DOUBLE, DOUBLE), (*tests, EVERY_WAY, EVERY_WAY_ON), kinds)


def _refused(what: str, why: str, *tests: str) -> Row:
    return Row(what, (f"refused: {why}", SAME, SAME, SAME), tests)


def _framework(what: str, *tests: str) -> Row:
    return Row(what, (RUNS, NO_WAY, DOUBLE, NO_WAY), (*tests, ON_DOUBLE))


ON_DOUBLE = "test_a_rank_dies_on_the_double"
"""Of frameworks: in files of their own."""
QUEUED = "test_what_a_loop_changes_behind_its_update_is_queued"
TRAINED_LATE = "test_a_parameter_that_is_trained_from_some_update_on"
EVERY_WAY = "test_every_way_to_update"
EVERY_WAY_ON = "test_every_way_to_update_is_gone_on_with"
BEHIND = "test_a_rank_dies_in_its_backward_pass"
BEHIND_REPLACED = "test_a_rank_that_died_in_its_backward_pass_is_replaced"
ROWS = (
    _plain(
        "`DistributedDataParallel`",
        *("test_every_point", "test_a_rank_is_replaced", BEHIND, BEHIND_REPLACED),
        kinds=("ddp",),
    ),
    _plain(
        "FSDP2 with a replicate dimension (HSDP)",
        *("test_every_point", "test_a_rank_is_replaced", BEHIND, BEHIND_REPLACED),
        kinds=("hsdp",),
    ),
    _plain(
        "…, with tensor parallelism",
        *("test_every_point", "test_a_rank_is_replaced", BEHIND, BEHIND_REPLACED),
        kinds=("tensor parallel",),
    ),
    _plain(
        "`ReplicatedZero`",
        *("test_every_point", "test_a_rank_is_replaced", BEHIND, BEHIND_REPLACED),
        kinds=("zero",),
    ),
    _plain(
        "groups of experts with optimizers of their own",
        *("test_every_point", "test_a_rank_is_replaced", BEHIND, BEHIND_REPLACED),
        kinds=("experts",),
    ),
    Row(
        "a state of one's own, the same in all ranks (`state=`)",
        (RUNS, NO_WAY, "the tensors themselves: double; copies: refused", NO_WAY),
        ("test_a_rank_dies", "test_what_is_missing_is_named", "test_copies_are_refused"),
    ),
    Row(
        "FSDP2 without a replicate dimension, ZeRO without copies, with `buddy_every`",
        (RUNS, RUNS, DOUBLE, DOUBLE),
        (
            "test_the_buddy_writes_what_a_lost_rank_held",
            "test_a_lost_rank_costs_the_steps_since_the_last_copy",
            *(BEHIND, BEHIND_REPLACED),
        ),
        ("fsdp",),
    ),
    Row(
        "DeepSpeed",
        ("refused: nobody else holds a shard", RUNS, SAME, DOUBLE),
        (
            "test_a_shard_that_nobody_else_holds_is_refused",
            "test_a_rank_of_zero_is_replaced",
            "test_a_rank_of_zero_is_replaced_on_the_double",
        ),
    ),
    Row(
        "torchtitan's trainer, with copies or `buddy_every`",
        (RUNS, RUNS, DOUBLE, DOUBLE),
        (
            *("test_a_rank_of_torchtitan_dies", "test_a_rank_of_torchtitan_is_replaced"),
            "test_a_rank_of_torchtitan_dies_on_the_double",
            "test_a_rank_of_torchtitan_is_replaced_on_the_double",
        ),
    ),
    Row(
        "Megatron-Core, distributed optimizer in two instances",
        (RUNS, RUNS, DOUBLE, DOUBLE),
        (
            *("test_a_rank_dies", "test_a_rank_is_replaced"),
            *(ON_DOUBLE, "test_a_rank_is_replaced_on_the_double"),
        ),
    ),
    Row(
        "…, with tensor, pipeline, context and expert parallelism",
        (RUNS, RUNS, DOUBLE, DOUBLE),
        (
            *("test_with_tensor_parallelism", "test_two_groups_of_experts"),
            *("test_two_stages_of_a_pipeline", "test_context_parallel_groups"),
            "test_a_rank_of_a_parallel_model_dies_on_the_double",
            "test_a_rank_of_a_parallel_model_is_replaced",
            "test_a_rank_of_a_parallel_model_is_replaced_on_the_double",
        ),
    ),
    _framework("transformers' Trainer", "test_one_rank_is_killed"),
    _framework("Lightning", "test_one_rank_is_killed"),
    _framework("accelerate", "test_one_rank_is_killed"),
    _update("foreach and fused optimizers", "foreach", "fused"),
    _update(
        "clipping of gradients",
        *("clipped", "clipped shards"),
        tests=("test_who_was_not_let_through_does_the_update_with_what_it_gave_to_others",),
    ),
    _update("several backward passes to an update", "accumulated"),
    _update(
        "`GradScaler`, also with a fused optimizer, and overflows",
        *("scaled", "scaled, fused", "overflowing"),
        tests=("test_a_step_that_a_scaler_skips_moves_nothing", QUEUED),
    ),
    _update("an optimizer that calls its base class's step", "derived"),
    _update(
        "parameters that a loop changes behind its update, told by `after_update=` or not",
        "followed",
        tests=(QUEUED, "test_parameters_that_the_loop_changes_behind_its_update"),
    ),
    _update(
        "others for an evaluation (`long_operation()`)",
        "evaluated",
        tests=(QUEUED, "test_averaged_weights_of_an_evaluation_that_hangs"),
    ),
    _update(
        "parameters that no optimizer updates and that a loop moves",
        "momentum",
        tests=("test_parameters_that_no_optimizer_updates_and_that_the_loop_moves",),
    ),
    Row(
        "`add_param_group` behind the start, for a frozen parameter",
        (RUNS, "refused: call `restore` anew", "double, with DDP", SAME),
        (TRAINED_LATE, "test_what_is_trained_from_some_update_on_is_refused"),
    ),
    _update(
        "several optimizers",
        "several optimizers",
        tests=("test_every_point", "test_a_rank_is_replaced"),
    ),
    _refused(
        "several optimizers with a scaler",
        "it may skip one of them: `begin_update`, `end_update` and `update=`",
        "test_a_step_that_a_scaler_skips_moves_nothing",
    ),
    _update("a model that `torch.compile` was put around", "compiled"),
    Row(
        "capturable optimizers, a learning rate on the device",
        ("torch has none on processors", "", DOUBLE, DOUBLE),
        (EVERY_WAY, EVERY_WAY_ON),
        ("capturable",),
    ),
    _refused(
        "an optimizer that needs its closure, or calls it twice (LBFGS)",
        "gradients inside of the update",
        "test_gradients_of_a_closure_are_complete_when_it_returns",
    ),
    _refused(
        "another backend than gloo, nccl, hccl",
        "nobody can be got out of its collectives",
        "test_which_backends_are_taken",
    ),
)


def table() -> str:
    """As the page has it."""
    lines = [" | ".join(COLUMNS), "|".join(["---"] * len(COLUMNS))]
    lines += [" | ".join((row.what, *row.cells)) for row in ROWS]
    return "".join(f"| {line} |\n" if "---" not in line else f"|{line}|\n" for line in lines)


def parted(page: str) -> tuple[str, str, str]:
    """(before the table, the table, behind it)."""
    before, heading, rest = page.partition(HEADING)
    text, bar, rest = rest.partition("\n|")
    rows, blank, behind = (bar[1:] + rest).partition("\n\n")
    return before + heading + text + "\n", rows + "\n", blank[1:] + behind


def main() -> None:
    """Write it."""
    before, _, behind = parted(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(before + table() + behind, encoding="utf-8")


if __name__ == "__main__":
    main()
