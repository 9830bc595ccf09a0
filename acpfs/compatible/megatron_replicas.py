"""What MindSpeed-LLM 1.0 imports from `mindio_ttp.adaptor`: the product's own optimizers with
copies. Refused, with what to use instead.
"""

from __future__ import annotations

from typing import Any

from acpfs.compatible.framework import tft_is_reboot_node
from acpfs.compatible.refusal import UnsupportedError

INSTEAD = (
    "Megatron-Core keeps the copies itself (--num-distributed-optimizer-instances 2); "
    "protect_megatron saves and restore_megatron replaces "
    "ranks of it, and acpfs has no optimizer and no training loop of its own"
)


def tft_init_controller_processor(enable_tls: bool = True, tls_option_top_path: str = "") -> None:
    raise UnsupportedError(f"tft_init_controller_processor: {INSTEAD}")


def tft_register_processor(
    train_valid_test_dataset_provider: Any, model_provider: Any, model_type: Any
) -> None:
    raise UnsupportedError(f"tft_register_processor: {INSTEAD}")


def tft_train(train_args: Any, test_data_iterator_list: Any) -> Any:
    raise UnsupportedError(f"tft_train: {INSTEAD}")


def ttp_initialize_replica_dp_group(
    pipeline_model_parallel_size: int,
    tensor_model_parallel_size: int,
    context_parallel_size: int,
    expert_model_parallel_size: int,
    world_size: int,
) -> None:
    raise UnsupportedError(f"ttp_initialize_replica_dp_group: {INSTEAD}")


def tft_set_losses_reduced(losses_reduced: Any) -> None:
    raise UnsupportedError(f"tft_set_losses_reduced: {INSTEAD}")


def tft_is_arf_reboot_node() -> bool:
    """Whether this process takes the place of another one."""
    return tft_is_reboot_node()
