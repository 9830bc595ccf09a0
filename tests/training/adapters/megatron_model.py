"""The smallest model of Megatron's own layers: a tensor-parallel pair, and a norm that all tensor-parallel ranks have."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule


class Network(MegatronModule):  # type: ignore[misc]  # megatron is Any where types are checked
    """`width` numbers in and out."""

    def __init__(self, config: Any, width: int) -> None:
        super().__init__(config)
        common = {"config": config, "init_method": torch.nn.init.xavier_normal_}
        self.up = ColumnParallelLinear(width, 2 * width, gather_output=False, **common)
        self.down = RowParallelLinear(2 * width, width, bias=True, input_is_parallel=True, skip_bias_add=False, **common)
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, values: Any) -> Any:
        return self.norm(self.down(torch.tanh(self.up(values)[0]))[0])
