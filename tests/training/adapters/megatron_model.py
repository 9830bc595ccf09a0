"""The smallest models of Megatron-Core's own layers.

A tensor-parallel pair with a norm that all tensor-parallel ranks have, experts behind it, and one
stage of that where there is a pipeline.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module


class Pair(MegatronModule):  # type: ignore[misc]  # megatron is Any where types are checked
    """`width` numbers in and out."""

    def __init__(self, config: Any, width: int) -> None:
        super().__init__(config)
        common = {"config": config, "init_method": torch.nn.init.xavier_normal_}
        self.up = ColumnParallelLinear(width, 2 * width, gather_output=False, **common)
        self.down = RowParallelLinear(
            2 * width, width, bias=True, input_is_parallel=True, skip_bias_add=False, **common
        )
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, values: Any) -> Any:
        return self.norm(self.down(torch.tanh(self.up(values)[0]))[0])


class Network(MegatronModule):  # type: ignore[misc]
    """Tokens in and out: sequence, batch, `width`.

    `stage`: which one of a pipeline; names have its number.
    """

    def __init__(self, config: Any, width: int, stage: int) -> None:
        super().__init__(config)
        setattr(
            self, f"stage{stage}", Pair(config, width)
        )  # Megatron does not look into a ModuleDict
        self.stage = f"stage{stage}"
        self.experts = ""
        if config.num_moe_experts:
            self.experts = f"experts{stage}"
            spec = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts)
            setattr(self, self.experts, build_module(spec, config=config))
        self.from_before: Any = None
        self.model_type = ModelType.encoder_or_decoder
        self.pre_process = stage == 0
        self.post_process = True
        self.share_embeddings_and_output_weights = False

    def set_input_tensor(self, values: Any) -> None:
        """What the stage before has sent."""
        self.from_before = values[0] if isinstance(values, list) else values

    def forward(self, values: Any) -> Any:
        found = getattr(self, self.stage)(values if self.from_before is None else self.from_before)
        return found + getattr(self, self.experts)(found)[0] if self.experts else found
