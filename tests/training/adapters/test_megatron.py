"""Megatron-Core's distributed optimizer with two instances: ranks die, and Megatron's own loader
goes on from what the others leave.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from acpfs.errors import ConfigError
from acpfs.training.manifest import verify
from acpfs.training.messages import ExitStatus, Manifest
from tests.training.adapters import megatron_on_processors, on_double
from tests.training.ranks.behind import FLAG, MANY, SLOW_S, WRONG, OnDouble
from tests.training.ranks.forked import Ranks, join_group
from tests.training.ranks.jobs import assert_same

megatron = pytest.importorskip("megatron.core")
pytestmark = pytest.mark.long
WORLD = 4
STEPS = 8
DIES = 5
KILLS = 20
"""Within so many a wrong gate is found."""
END_S = 600.0
"""Megatron starts a process for each save, which takes its time on a busy machine."""
WIDTH = 16
TOKENS = 4
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 2 * WIDTH,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "expert_model_parallel_size": 2,
    "add_bias_linear": False,
}
PARTS = {
    1: "shards of two ranks in each instance",
    2: "two model-parallel parts, one rank of each in each instance",
}


@dataclass(frozen=True)
class Run:
    """`dies`: rank → point at which it kills itself in update `DIES`."""

    directory: Path
    tensor_parallel: int = 1
    precision: torch.dtype = torch.bfloat16
    pipeline: int = 1
    context: int = 1
    experts: int = 0
    """In groups of two ranks; 0: none."""
    protected: bool = True
    resumed: bool = False
    dies: Mapping[int, str] = field(default_factory=dict)
    double: bool = False
    """Whether on the double of a device that runs behind its host; else over gloo."""
    clips: bool = True
    """Whether gradients are clipped: Megatron waits for their norm."""
    reads_norm: bool = True
    """Whether it does where gradients are not clipped, too, as Megatron-Core 0.16.1."""
    world: int = WORLD
    gate: str = ""
    """Which one is wrong; empty: none."""
    slow: int = -1
    """The rank whose collectives take longer from update `DIES` on, on the double."""
    swaps: bool = False
    """Whether averaged parameters are swapped in behind each update, where all ranks meet."""


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
            tensor_model_parallel_size=run.tensor_parallel,
            pipeline_model_parallel_size=run.pipeline,
            context_parallel_size=run.context,
            expert_model_parallel_size=2 if run.experts else 1,
            num_distributed_optimizer_instances=2,
            create_gloo_process_groups=True,
        )
        halved = {"bf16": run.precision is torch.bfloat16, "params_dtype": run.precision}
        config = TransformerConfig(
            num_layers=2,
            hidden_size=WIDTH,
            num_attention_heads=2,
            use_cpu_initialization=True,
            tensor_model_parallel_size=run.tensor_parallel,
            pipeline_model_parallel_size=run.pipeline,
            pipeline_dtype=run.precision,
            context_parallel_size=run.context,
            **halved,
            **(EXPERTS if run.experts else {}),
        )
        stage = parallel_state.get_pipeline_model_parallel_rank()
        torch.manual_seed(5 + stage)
        self.config = config
        self.run = run
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=True, num_distributed_optimizer_instances=2
        )
        network = Network(config, WIDTH, stage).to(run.precision)
        self.model = DistributedDataParallel(config, ddp, network)
        self.model.broadcast_params()
        settings = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            min_lr=1e-4,
            weight_decay=0.01,
            clip_grad=1.0 if run.clips else 0.0,
            use_distributed_optimizer=True,
            **halved,
        )
        self.optimizer = get_megatron_optimizer(settings, [self.model])
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, 0.0, 1e-2, 1e-4, 2, 20, "cosine", 0.01, 0.01, 20, "constant"
        )
        self.chain = self.optimizer.chained_optimizers
        assert len(self.chain) == (2 if run.experts else 1)
        self.precision = run.precision
        self.done = 0
        self.at: Callable[[str], object] = str
        self.order: Callable[[], object] = int
        self.part = parallel_state.get_context_parallel_rank()
        self.parts = run.context
        torch.manual_seed(100 + parallel_state.get_data_parallel_rank())

    def step(self) -> None:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.order()  # the forward pass is behind the update
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        batches = [
            torch.randn(TOKENS, 1, WIDTH).to(self.precision).chunk(self.parts)[self.part]
            for _ in range(self.run.pipeline)
        ]

        def forward(data: Any, model: Any) -> Any:
            batch = next(data)
            self.at("forward")
            return model(batch), lambda found: ((found - batch).float().square().mean(), {})

        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(batches),
            model=[self.model],
            num_microbatches=len(batches),
            seq_length=TOKENS,
            micro_batch_size=1,
        )
        self.at("backward")
        finalize_model_grads([self.model])
        self.at("reduce")
        succeeded, _, _ = self.optimizer.step()
        assert succeeded

    def end_of_step(self) -> None:
        self.scheduler.step(increment=1)

    def sharded(self, *, is_loading: bool) -> dict[str, Any]:
        from acpfs.training.frameworks.megatron import METADATA

        model = self.model.module.sharded_state_dict(metadata=METADATA)
        return {
            "model": model,
            "optimizer": self.optimizer.sharded_state_dict(
                model, is_loading=is_loading, metadata=METADATA
            ),
        }

    def load(self, run: Run) -> Any:
        """As Megatron's loop does: its tracker, its loader. What was in the checkpoint."""
        from megatron.core import dist_checkpointing

        from acpfs.training.frameworks.megatron import give_steps_back

        iteration = int((run.directory / "latest_checkpointed_iteration.txt").read_text())
        checkpoint = run.directory / f"iter_{iteration:07d}"
        assert (
            dist_checkpointing.load_content_metadata(str(checkpoint))["distrib_optim_sharding_type"]
            == "dp_reshardable"
        )
        for one in self.chain:
            # torch's Adam has none before its first step, and Megatron asks for it
            one._init_optimizer_states_with_dummy_values()
        found = dist_checkpointing.load(self.sharded(is_loading=True), str(checkpoint))
        self.model.module.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])
        give_steps_back(self.optimizer)
        self.scheduler.load_state_dict(found["opt_param_scheduler"])
        self.done = found["iteration"]
        return found

    def state(self) -> dict[str, Any]:
        self.order()
        from acpfs.training.frameworks.megatron import MegatronShards

        shards = MegatronShards([self.model], self.optimizer, None, lambda _: {})
        main = {
            f"{number}.{name}": value
            for number, one in enumerate(shards.sharded)
            for name, value in one.main_state()
        }
        return {
            "main": {name: torch.as_tensor(value).detach().clone() for name, value in main.items()},
            "model": {
                name: value.detach().clone() for name, value in self.model.module.named_parameters()
            },
            "groups": [
                {key: value for key, value in group.items() if key != "params"}
                for group in self.optimizer.param_groups
            ],
            "scheduler": self.scheduler.state_dict(),
        }


def as_rank(rank: int, run: Run, name: str) -> None:
    warnings.simplefilter("ignore")
    from acpfs.training.frameworks.megatron import protect_megatron

    megatron_on_processors.stand_in()
    store = run.directory.parent / f"store-{name}"
    place: OnDouble | None = None
    if run.double and not run.resumed:  # its loader gathers what no device has
        place = on_double.join(rank, run.world, store, run.gate)
        on_double.put_megatron(place, reads_norm=run.reads_norm)
    else:
        join_group(rank, run.world, store)
    training = Training(rank, run)
    if place is not None:
        training.order = place.order
        on_double.order_megatron(place)
    if run.resumed:
        with (
            torch.no_grad()
        ):  # in single precision its loader copies into the parameters themselves
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
    # else the exception comes before a wrong gate is passed
    settings: dict[str, Any] = {"interrupt_after_s": 2.0} if run.gate else {}
    protection = protect_megatron(
        run.directory,
        model=[training.model],
        optimizer=training.optimizer,
        scheduler=training.scheduler,
        common=lambda step: {"of the script": step * 8},
        **settings,
    )
    with protection:
        number = 0

        def at(point: str) -> None:
            if place is not None and rank == run.slow and point == "backward" and number >= DIES:
                place.stream.slow_s = SLOW_S
            if number >= DIES and run.dies.get(rank) == point:
                os.kill(os.getpid(), signal.SIGKILL)

        protection.at(at)
        training.at = at
        gathering = training.model.start_param_sync

        def gathers(*args: Any, **kwargs: Any) -> Any:
            at("cast")
            found = gathering(*args, **kwargs)
            at("gathered")
            return found

        training.model.start_param_sync = gathers
        # garbage ends no loop
        for number in range(1, (MANY if run.gate else STEPS) + 1):  # noqa: B007  # `at` looks at it
            training.step()
            if run.swaps:
                with protection.long_operation(), swapped(training.optimizer):
                    at("swapped")
                    dist.barrier()
            training.end_of_step()


@contextmanager
def swapped(optimizer: Any) -> Iterator[None]:
    """Averaged parameters in place of the trained ones; not given back by an exception."""
    inner = [one.optimizer for one in getattr(optimizer, "chained_optimizers", [optimizer])]
    values = [value for one in inner for group in one.param_groups for value in group["params"]]
    kept = [value.detach().clone() for value in values]
    for value in values:
        value.data.fill_(77)
    yield
    for value, before in zip(values, kept, strict=True):
        value.data.copy_(before)


def end(run: Run, name: str, expected: list[int]) -> None:
    run.directory.mkdir(parents=True, exist_ok=True)
    with Ranks(run.world, run.directory.parent, lambda rank: as_rank(rank, run, name)) as ranks:
        assert ranks.statuses(END_S) == expected, f"{ranks.statuses()} {ranks.said()}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of runs without a fault."""
    return tmp_path_factory.mktemp("wholes")


def whole(run: Run, place: Path) -> Path:
    """Each rank's state at the end of each step of a run without a fault; made once per layout."""
    layout = f"{run.tensor_parallel}-{run.precision}-{run.pipeline}-{run.context}-{run.experts}"
    layout += f"-{run.world}"
    layout += "-double" if run.double else ""
    layout += "" if run.clips else "-not-clipped"
    layout += "" if run.reads_norm else "-no-norm"
    clean: dict[str, Any] = {"dies": {}, "swaps": False, "gate": "", "slow": -1}
    same = replace(run, directory=place / layout / "run", protected=False, **clean)
    if not same.directory.exists():
        end(same, "whole", [0] * run.world)
    return same.directory.parent


def gasp(run: Run, place: Path) -> Manifest:
    """Ranks die; what the others leave is, in Megatron's loader, the state of a run without the
    fault, bit for bit.
    """
    manifest = left(run)
    assert_is_its_step(run, manifest, place)
    return manifest


def left(run: Run) -> Manifest:
    """What the others leave."""
    end(
        run,
        "run",
        [-signal.SIGKILL if rank in run.dies else ExitStatus.SAVED for rank in range(run.world)],
    )
    (found,) = run.directory.glob("iter_*/gasp.json")
    return verify(found.parent)


def assert_is_its_step(run: Run, manifest: Manifest, place: Path) -> None:
    """In Megatron's loader, bit for bit."""
    expecting = whole(run, place)
    assert manifest.step in (DIES - 1, DIES)
    assert not manifest.differing
    assert (run.directory / "latest_checkpointed_iteration.txt").read_text() == f"{manifest.step}\n"
    end(replace(run, resumed=True, dies={}), "resumed", [0] * run.world)
    for rank in range(run.world):
        loaded = torch.load(run.directory.parent / f"resumed-loaded-{rank}.pt", weights_only=False)
        expected = torch.load(expecting / f"whole-{manifest.step}-{rank}.pt", weights_only=False)
        assert_same(loaded, expected, f"rank {rank}")


@pytest.mark.clause("T59", "T60", "T113")
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("point", ["ready", "gated", "updating", "updated", "cast", "gathered"])
def test_a_rank_dies(tmp_path: Path, place: Path, point: str, rank: int) -> None:
    manifest = gasp(Run(tmp_path / "run", dies={rank: point}), place)
    assert set(manifest.cover) == {"ranks-0-2", "ranks-1-3"}, PARTS[1]
    assert manifest.step == (DIES - 1 if point == "ready" else DIES) or point == "gated"


@pytest.mark.clause("T59", "T60")
@pytest.mark.parametrize(
    "dies", [{0: "gated"}, {1: "updated", 2: "gated"}, {0: "cast", 1: "saving"}]
)
def test_with_tensor_parallelism(tmp_path: Path, place: Path, dies: dict[int, str]) -> None:
    manifest = gasp(Run(tmp_path / "run", 2, dies=dies), place)
    assert set(manifest.cover) == {"ranks-0-2", "ranks-1-3"}, PARTS[2]


@pytest.mark.clause("T112")
@pytest.mark.parametrize(
    "dies",
    [
        {0: "ready"},
        {3: "gated"},
        {1: "updating"},
        {2: "updated"},
        {1: "cast"},
        {0: "gathered"},
        {0: "cast", 1: "saving"},
    ],
)
def test_two_groups_of_experts(tmp_path: Path, place: Path, dies: dict[int, str]) -> None:
    """`cast` and `gathered` lie between the optimizers of everything else and of experts, when that
    of the first dies.
    """
    manifest = gasp(Run(tmp_path / "run", experts=4, dies=dies), place)
    assert set(manifest.cover) == {"ranks-0-2", "ranks-1-3"}


@pytest.mark.clause("T112")
@pytest.mark.parametrize(
    "dies", [{0: "forward"}, {2: "ready"}, {1: "gated"}, {3: "updated"}, {0: "cast", 2: "saving"}]
)
def test_two_stages_of_a_pipeline(tmp_path: Path, place: Path, dies: dict[int, str]) -> None:
    manifest = gasp(Run(tmp_path / "run", pipeline=2, dies=dies), place)
    assert set(manifest.cover) == {"ranks-0-1", "ranks-2-3"}


@pytest.mark.clause("T112")
@pytest.mark.parametrize("dies", [{0: "ready"}, {3: "gated"}, {1: "cast", 0: "saving"}])
def test_context_parallel_groups(tmp_path: Path, place: Path, dies: dict[int, str]) -> None:
    manifest = gasp(Run(tmp_path / "run", context=2, dies=dies), place)
    assert set(manifest.cover) == {"ranks-0-2", "ranks-1-3"}


@pytest.mark.clause("T60", "T61")
@pytest.mark.parametrize("dies", [{2: "gated"}, {0: "saving", 3: "updated"}])
def test_in_single_precision_and_with_a_second_death_while_the_others_save(
    tmp_path: Path, place: Path, dies: dict[int, str]
) -> None:
    gasp(Run(tmp_path / "run", 1, torch.float32, dies=dies), place)


@pytest.mark.clause("T182")
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32])
def test_a_rank_dies_in_an_evaluation_with_averaged_parameters(
    tmp_path: Path, place: Path, precision: Any
) -> None:
    gasp(Run(tmp_path / "run", 1, precision, dies={0: "swapped"}, swaps=True), place)


@pytest.mark.clause("T228")
@pytest.mark.parametrize(
    "dies",
    [
        {1: "forward"},
        {3: "reduce"},
        {0: "gated"},
        {2: "updating"},
        {1: "updated"},
        {3: "cast"},
        {0: "gathered"},
        {0: "cast", 1: "saving"},
    ],
)
def test_a_rank_dies_on_the_double(tmp_path: Path, place: Path, dies: dict[int, str]) -> None:
    manifest = gasp(Run(tmp_path / "run", double=True, dies=dies), place)
    assert set(manifest.cover) == {"ranks-0-2", "ranks-1-3"}


PARALLEL: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel": 2},
    "pipeline": {"pipeline": 2},
    "context": {"context": 2},
    "experts": {"experts": 4},
    "tensor, pipeline and context": {
        "tensor_parallel": 2,
        "pipeline": 2,
        "context": 2,
        "world": 2 * WORLD,
    },
    "pipeline and experts": {"pipeline": 2, "experts": 4, "world": 2 * WORLD},
}


@pytest.mark.clause("T228")
@pytest.mark.parametrize("layout", PARALLEL)
@pytest.mark.parametrize("dies", [{1: "forward"}, {3: "reduce"}, {0: "updating"}, {2: "cast"}])
def test_a_rank_of_a_parallel_model_dies_on_the_double(
    tmp_path: Path, place: Path, layout: str, dies: dict[int, str]
) -> None:
    """With what parts of a model exchange in forward and backward passes."""
    gasp(Run(tmp_path / "run", double=True, dies=dies, **PARALLEL[layout]), place)


@pytest.mark.clause("T228")
@pytest.mark.parametrize("dies", [{1: "forward"}, {3: "reduce"}, {2: "updated"}])
def test_nothing_waits_before_the_update_on_the_double(
    tmp_path: Path, place: Path, dies: dict[int, str]
) -> None:
    gasp(Run(tmp_path / "run", double=True, clips=False, reads_norm=False, dies=dies), place)


BEHIND_GLOO: dict[str, Any] = {"dies": {1: "updated"}, "slow": 3}
"""The second gate, over gloo, is passed when all hosts are there: one dies behind it, and the
gradients of another one are not there yet.
"""


@pytest.mark.clause("T228")
@pytest.mark.parametrize("gate", sorted(WRONG))
def test_each_wrong_gate_is_found(tmp_path: Path, place: Path, gate: str) -> None:
    """Where nothing waits before the update. Where nobody looks at the hold the second gate is deaf
    as well.
    """
    fault = {"dies": {1: "forward"}} if gate == FLAG else BEHIND_GLOO
    outcomes: list[list[int]] = []
    for kill in range(KILLS):
        directory = tmp_path / str(kill) / "run"
        run = Run(directory, double=True, clips=False, reads_norm=False, gate=gate, **fault)
        if is_wrong(run, place, outcomes):
            return
    pytest.fail(f"{gate} was not found: {outcomes}")


@pytest.mark.clause("T228")
@pytest.mark.parametrize("gate", sorted(WRONG.keys() - {FLAG}))
def test_the_norm_is_a_gate_too(tmp_path: Path, place: Path, gate: str) -> None:
    """Who has read it has its gradients, and nobody passes the second gate before all have."""
    run = Run(tmp_path / "run", double=True, clips=False, gate=gate, **BEHIND_GLOO)
    outcomes: list[list[int]] = []
    assert not is_wrong(run, place, outcomes), outcomes
    assert list(run.directory.glob("iter_*/gasp.json")), outcomes


def is_wrong(run: Run, place: Path, outcomes: list[list[int]]) -> bool:
    """Whether what is left is of an update that nobody could have done without the dead, or not
    that one's state.
    """
    run.directory.mkdir(parents=True)
    with Ranks(run.world, run.directory.parent, lambda rank: as_rank(rank, run, "run")) as ranks:
        outcomes.append(ranks.statuses(END_S))
    for found in run.directory.glob("iter_*/gasp.json"):
        manifest = verify(found.parent)
        if manifest.step > DIES:
            return True
        try:
            assert_is_its_step(run, manifest, place)
        except AssertionError:
            return True
    return False


@pytest.mark.clause("T62")
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"kind": object}, "use-distributed-optimizer"),
        ({"grad_scaler": object()}, "bf16"),
        ({"instances": 1}, "instances 2"),
        ({"precision_aware": True}, "precision-aware"),
    ],
)
def test_what_is_refused(changed: dict[str, Any], said: str) -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from acpfs.training.frameworks.megatron import only_distributed

    config = SimpleNamespace(
        use_megatron_fsdp=False, num_distributed_optimizer_instances=changed.get("instances", 2)
    )
    made = changed.get("kind", DistributedOptimizer)
    one = made.__new__(made) if made is DistributedOptimizer else SimpleNamespace()
    own = SimpleNamespace(use_precision_aware_optimizer=changed.get("precision_aware", False))
    vars(one).update(
        ddp_config=config,
        config=own,
        grad_scaler=changed.get("grad_scaler"),
        is_stub_optimizer=False,
    )
    chained = SimpleNamespace(chained_optimizers=[one])
    with pytest.raises(ConfigError, match=said):
        only_distributed(chained)
