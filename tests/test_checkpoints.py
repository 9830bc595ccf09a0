"""Recognition of checkpoints: the layouts that frameworks write (docs/OPERATIONS.md), and what only
looks like them.
"""

from __future__ import annotations

import pytest

from acpfs.checkpoints import Checkpoint, Checkpoints
from acpfs.errors import ConfigError

LAYOUTS = [
    ("run1/iter_0001000/mp_rank_00/model_optim_rng.pt", "run1", "iter_0001000", 0, 1000),
    ("run1/iter_0001000/__0_0.distcp", "run1", "iter_0001000", 0, 1000),
    ("out/checkpoint-500/model-00001-of-00002.safetensors", "out", "checkpoint-500", 0, 500),
    ("out/checkpoint-500/rng_state_0.pth", "out", "checkpoint-500", 0, 500),
    (
        "out/checkpoint-500/global_step500/zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "out",
        "checkpoint-500",
        0,
        500,
    ),
    ("out/global_step10/mp_rank_00_model_states.pt", "out", "global_step10", 0, 10),
    ("checkpoints/checkpoint_0/optimizer.bin", "checkpoints", "checkpoint_0", 0, 0),
    ("checkpoint_000001/.metadata", "", "checkpoint_000001", 0, 1),
    ("outputs/checkpoint/step-1000/__3_0.distcp", "outputs/checkpoint", "step-1000", 0, 1000),
    ("a/step_100", "a", "step_100", 0, 100),
    (
        "lightning_logs/version_0/checkpoints/epoch=3-step=100.ckpt",
        "lightning_logs/version_0/checkpoints",
        "epoch=3-step=100.ckpt",
        3,
        100,
    ),
    ("l/epoch=3-step=100-v1.ckpt", "l", "epoch=3-step=100-v1.ckpt", 3, 100),
    ("l/epoch=03-val_loss=0.32.ckpt", "l", "epoch=03-val_loss=0.32.ckpt", 3, 3),
    (
        "nemo/megatron_gpt--val_loss=2.34-step=1000-consumed_samples=8000.0/weights/common.pt",
        "nemo",
        "megatron_gpt--val_loss=2.34-step=1000-consumed_samples=8000.0",
        0,
        1000,
    ),
    ("ckpt/NETWORK-1_10.ckpt", "ckpt", "*-1_10.ckpt", 1, 10),
    ("ckpt/rank_3/llama_7b_rank_3-2_10.ckpt", "ckpt", "rank_*/*-2_10.ckpt", 2, 10),
    ("x/model_1000.pt", "x", "*_1000.pt", 0, 1000),
    ("x/optimizer_1000.pt", "x", "*_1000.pt", 0, 1000),
    ("x/epoch_7.pth", "x", "epoch_7.pth", 7, 7),
    ("x/checkpoint_2_500.pt", "x", "checkpoint_2_500.pt", 2, 500),
    ("tf/ckpt-5.data-00000-of-00001", "tf", "*-5.*", 0, 5),
    ("tf/ckpt-5.index", "tf", "*-5.*", 0, 5),
    ("orbax/12/default/ocdbt.process_0/d/abc", "orbax", "12", 0, 12),
    ("orbax/12/params.zarr/c/0/1", "orbax", "12", 0, 12),
    ("runs/17/checkpoint-500/model.safetensors", "runs/17", "checkpoint-500", 0, 500),
]

OTHERS = [
    "run1/latest_checkpointed_iteration.txt",
    "run1/latest",
    "events.out.tfevents.1700000000.host.1.0",
    "model.pt",
    "last.ckpt",
    "data/shard_0001.bin",
    "final/model-00001-of-00002.safetensors",
    "ckpt/.tmpAbC123",
    "ckpt/NETWORK-1_10.ckpt.tmp",
    "out/tmp-checkpoint-500/model.safetensors",
    "orbax/12.orbax-checkpoint-tmp-0/default/manifest.ocdbt",
    "orbax/12",
    "l/epoch=3-step=100.ckpt.part",
    "data.zarr/c/3/0",
    "group/weights/c/3/0/1",
    "data.zarr/3/0",
    "data.n5/s0/3/0",
    "",
]


@pytest.mark.parametrize(
    ("path", "save_dir", "name", "epoch", "step"), LAYOUTS, ids=[row[0] for row in LAYOUTS]
)
def test_what_frameworks_write_is_recognised(
    path: str, save_dir: str, name: str, epoch: int, step: int
) -> None:
    assert Checkpoints().of(path.encode()) == Checkpoint(
        save_dir.encode(), name.encode(), step, epoch
    )


@pytest.mark.parametrize("path", OTHERS)
def test_what_only_lies_near_is_not(path: str) -> None:
    assert Checkpoints().of(path.encode()) is None


def test_a_directory_belongs_to_its_own_checkpoint() -> None:
    checkpoints = Checkpoints()
    assert checkpoints.of(b"out/checkpoint-500", directory=True) == checkpoints.of(
        b"out/checkpoint-500/a"
    )
    assert checkpoints.of(b"orbax/12", directory=True) == checkpoints.of(b"orbax/12/default/x")
    assert checkpoints.of(b"out", directory=True) is None


def test_newer_ones_come_later_in_the_order() -> None:
    checkpoints = Checkpoints()
    paths = [b"c/N-1_1875.ckpt", b"c/N-2_10.ckpt", b"c/N-2_100.ckpt", b"c/N-10_10.ckpt"]
    found = [checkpoint for path in paths if (checkpoint := checkpoints.of(path)) is not None]
    assert sorted(found, key=lambda checkpoint: checkpoint.order, reverse=True) == found[::-1]
    assert len(set(found)) == 4


def test_own_patterns_replace_the_known_ones() -> None:
    checkpoints = Checkpoints(["snap-{step}.{part}", "best"])
    assert (
        checkpoints.of(b"a/snap-7.weights")
        == checkpoints.of(b"a/snap-7.state")
        == Checkpoint(b"a", b"snap-7.*", 7)
    )
    assert checkpoints.of(b"a/best/x") == Checkpoint(b"a", b"best", None)
    assert checkpoints.of(b"a/checkpoint-500/x") is None
    assert Checkpoints([]).of(b"a/checkpoint-500/x") is None


def test_names_of_any_bytes() -> None:
    assert Checkpoints().of(b"\xff\n/checkpoint-1/\xfe") == Checkpoint(
        b"\xff\n", b"checkpoint-1", 1
    )
    assert Checkpoints().of(b"a/checkpoint-1\n/x") is None


@pytest.mark.parametrize(
    "pattern", ["", "/abs-{step}", "{steps}", "{step}-{step}", "open{step", "close}"]
)
def test_nonsense_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(ConfigError, match=r"pattern|none of|brace"):
        Checkpoints([pattern])
