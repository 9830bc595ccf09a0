"""Megatron-Core's distributed optimizer with two instances: ranks die, and Megatron's own loader goes on from what the others leave."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from acpfs.errors import ConfigError
from acpfs.training.manifest import verify
from acpfs.training.messages import ExitStatus, Manifest
from tests.training.adapters import megatron_on_processors
from tests.training.ranks.forked import Ranks, join_group
from tests.training.ranks.jobs import assert_same

megatron = pytest.importorskip("megatron.core")
pytestmark = pytest.mark.long
WORLD, STEPS, DIES, WIDTH = 4, 8, 5, 16
PARTS = {1: "shards of two ranks in each instance", 2: "two model-parallel parts, one rank of each in each instance"}


@dataclass(frozen=True)
class Run:
    """`dies`: rank → point at which it kills itself in update `DIES`."""

    directory: Path
    tensor_parallel: int = 1
    precision: torch.dtype = torch.bfloat16
    protected: bool = True
    resumed: bool = False
    dies: Mapping[int, str] = field(default_factory=dict)


class Training:
    """One rank, as Megatron's own loop has it."""

    def __init__(self, rank: int, run: Run) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.transformer.transformer_config import TransformerConfig

        from tests.training.adapters.megatron_model import Network

        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=run.tensor_parallel, num_distributed_optimizer_instances=2, create_gloo_process_groups=True
        )
        halved = {"bf16": run.precision is torch.bfloat16, "params_dtype": run.precision}
        config = TransformerConfig(
            num_layers=1,
            hidden_size=WIDTH,
            num_attention_heads=2,
            use_cpu_initialization=True,
            tensor_model_parallel_size=run.tensor_parallel,
            **halved,
        )
        torch.manual_seed(5)
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, num_distributed_optimizer_instances=2)
        network = Network(config, WIDTH).to(run.precision)
        self.model = DistributedDataParallel(config, ddp, network)
        self.model.broadcast_params()
        settings = OptimizerConfig(
            optimizer="adam", lr=1e-2, min_lr=1e-4, weight_decay=0.01, clip_grad=1.0, use_distributed_optimizer=True, **halved
        )
        self.optimizer = get_megatron_optimizer(settings, [self.model])
        self.scheduler = OptimizerParamScheduler(self.optimizer, 0.0, 1e-2, 1e-4, 2, 20, "cosine", 0.01, 0.01, 20, "constant")
        self.inner = self.optimizer.chained_optimizers[0]
        self.precision, self.data_rank, self.done = run.precision, rank // run.tensor_parallel, 0
        torch.manual_seed(100 + self.data_rank)

    def step(self) -> None:
        from megatron.core.distributed import finalize_model_grads

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        batch = torch.randn(4, WIDTH).to(self.precision)
        (self.model(batch) - batch).float().square().mean().backward()
        finalize_model_grads([self.model])
        succeeded, _, _ = self.optimizer.step()
        assert succeeded

    def end_of_step(self) -> None:
        self.scheduler.step(increment=1)

    def sharded(self, *, is_loading: bool) -> dict[str, Any]:
        from acpfs.training.frameworks.megatron import METADATA

        model = self.model.module.sharded_state_dict(metadata=METADATA)
        return {"model": model, "optimizer": self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=METADATA)}

    def load(self, run: Run) -> Any:
        """As Megatron's loop does: its tracker, its loader. What was in the checkpoint."""
        from megatron.core import dist_checkpointing

        iteration = int((run.directory / "latest_checkpointed_iteration.txt").read_text())
        checkpoint = run.directory / f"iter_{iteration:07d}"
        assert dist_checkpointing.load_content_metadata(str(checkpoint))["distrib_optim_sharding_type"] == "dp_reshardable"
        self.inner._init_optimizer_states_with_dummy_values()  # torch's Adam has none before its first step, and Megatron asks for it
        found = dist_checkpointing.load(self.sharded(is_loading=True), str(checkpoint))
        self.model.module.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])
        for group in self.inner.optimizer.param_groups:  # of torch's Adam the step is there; Megatron gives it back to its own only
            step = group.pop("step")
            for parameter in group["params"]:
                self.inner.optimizer.state[parameter]["step"] = torch.tensor(step)
        self.scheduler.load_state_dict(found["opt_param_scheduler"])
        self.done = found["iteration"]
        return found

    def state(self) -> dict[str, Any]:
        from acpfs.training.frameworks.megatron import MegatronShards

        shards = MegatronShards([self.model], self.optimizer, None, lambda _: {})
        return {
            "main": {name: torch.as_tensor(value).detach().clone() for name, value in shards.main_state()},
            "model": {name: value.detach().clone() for name, value in self.model.module.named_parameters()},
            "groups": [{key: value for key, value in group.items() if key != "params"} for group in self.inner.optimizer.param_groups],
            "scheduler": self.scheduler.state_dict(),
        }


def as_rank(rank: int, run: Run, name: str) -> None:
    warnings.simplefilter("ignore")
    from acpfs.training.frameworks.megatron import protect_megatron

    megatron_on_processors.stand_in()
    join_group(rank, WORLD, run.directory.parent / f"store-{name}")
    training = Training(rank, run)
    if run.resumed:
        with torch.no_grad():  # in single precision its loader copies into the parameters themselves
            found = training.load(run)
        assert found["of the script"] == training.done * 8
        torch.save(training.state(), run.directory.parent / f"{name}-loaded-{rank}.pt")
        return
    if not run.protected:
        for number in range(1, DIES + 1):
            training.step()
            training.end_of_step()
            torch.save(training.state(), run.directory.parent / f"{name}-{number}-{rank}.pt")
        return
    protection = protect_megatron(
        run.directory,
        model=[training.model],
        optimizer=training.optimizer,
        scheduler=training.scheduler,
        common=lambda step: {"of the script": step * 8},
    )
    with protection:
        number = 0

        def at(point: str) -> None:
            if number >= DIES and run.dies.get(rank) == point:
                os.kill(os.getpid(), signal.SIGKILL)

        protection.at(at)
        gathering = training.inner.model_chunks[0].start_param_sync

        def gathers(*args: Any, **kwargs: Any) -> Any:
            at("cast")
            found = gathering(*args, **kwargs)
            at("gathered")
            return found

        training.inner.model_chunks[0].start_param_sync = gathers
        for number in range(1, STEPS + 1):  # noqa: B007  # `at` looks at it
            training.step()
            training.end_of_step()


def end(run: Run, name: str, expected: list[int]) -> None:
    run.directory.mkdir(parents=True, exist_ok=True)
    with Ranks(WORLD, run.directory.parent, lambda rank: as_rank(rank, run, name)) as ranks:
        assert ranks.statuses(120) == expected, f"{ranks.statuses()} {ranks.said()}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of runs without a fault."""
    return tmp_path_factory.mktemp("wholes")


def whole(run: Run, place: Path) -> Path:
    """Each rank's state at the end of each step of a run without a fault; made once per layout."""
    same = Run(place / f"{run.tensor_parallel}-{run.precision}" / "run", run.tensor_parallel, run.precision, protected=False)
    if not same.directory.exists():
        end(same, "whole", [0] * WORLD)
    return same.directory.parent


def gasp(run: Run, place: Path) -> Manifest:
    """Ranks die; what the others leave is, in Megatron's loader, the state of a run without the fault, bit for bit."""
    expecting = whole(run, place)
    end(run, "run", [-signal.SIGKILL if rank in run.dies else ExitStatus.SAVED for rank in range(WORLD)])
    (found,) = run.directory.glob("iter_*/gasp.json")
    manifest = verify(found.parent)
    assert manifest.step in (DIES - 1, DIES)
    assert not manifest.differing
    assert (run.directory / "latest_checkpointed_iteration.txt").read_text() == f"{manifest.step}\n"
    end(Run(run.directory, run.tensor_parallel, run.precision, resumed=True), "resumed", [0] * WORLD)
    for rank in range(WORLD):
        loaded = torch.load(run.directory.parent / f"resumed-loaded-{rank}.pt", weights_only=False)
        expected = torch.load(expecting / f"whole-{manifest.step}-{rank}.pt", weights_only=False)
        assert_same(loaded, expected, f"rank {rank}")
    return manifest


@pytest.mark.clause("T59", "T60")
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("point", ["ready", "gated", "updating", "updated", "cast", "gathered"])
def test_a_rank_dies(tmp_path: Path, place: Path, point: str, rank: int) -> None:
    manifest = gasp(Run(tmp_path / "run", dies={rank: point}), place)
    assert set(manifest.cover) == {"ranks-0-2", "ranks-1-3"}, PARTS[1]
    assert manifest.step == (DIES - 1 if point == "ready" else DIES) or point == "gated"


@pytest.mark.clause("T59", "T60")
@pytest.mark.parametrize("dies", [{0: "gated"}, {1: "updated", 2: "gated"}, {0: "cast", 1: "saving"}])
def test_with_tensor_parallelism(tmp_path: Path, place: Path, dies: dict[int, str]) -> None:
    manifest = gasp(Run(tmp_path / "run", 2, dies=dies), place)
    assert set(manifest.cover) == {"ranks-0-2", "ranks-1-3"}, PARTS[2]


@pytest.mark.clause("T60", "T61")
@pytest.mark.parametrize("dies", [{2: "gated"}, {0: "saving", 3: "updated"}])
def test_in_single_precision_and_with_a_second_death_while_the_others_save(tmp_path: Path, place: Path, dies: dict[int, str]) -> None:
    gasp(Run(tmp_path / "run", 1, torch.float32, dies=dies), place)


@pytest.mark.clause("T62")
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"optimizers": 2}, "several"),
        ({"kind": object}, "use-distributed-optimizer"),
        ({"grad_scaler": object()}, "bf16"),
        ({"instances": 1}, "instances 2"),
    ],
)
def test_what_is_refused(changed: dict[str, Any], said: str) -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from acpfs.training.frameworks.megatron import only_distributed

    config = SimpleNamespace(use_megatron_fsdp=False, num_distributed_optimizer_instances=changed.get("instances", 2))
    made = changed.get("kind", DistributedOptimizer)
    one = made.__new__(made) if made is DistributedOptimizer else SimpleNamespace()
    vars(one).update(ddp_config=config, grad_scaler=changed.get("grad_scaler"), is_stub_optimizer=False)
    chained = SimpleNamespace(chained_optimizers=[one] * changed.get("optimizers", 1))
    with pytest.raises(ConfigError, match=said):
        only_distributed(chained)
