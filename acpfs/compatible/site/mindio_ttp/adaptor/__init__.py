"""What MindSpeed-LLM 1.0 imports."""

from acpfs.compatible.megatron_replicas import (
    tft_init_controller_processor,
    tft_is_arf_reboot_node,
    tft_register_processor,
    tft_set_losses_reduced,
    tft_train,
    ttp_initialize_replica_dp_group,
)

__all__ = [
    "tft_init_controller_processor",
    "tft_is_arf_reboot_node",
    "tft_register_processor",
    "tft_set_losses_reduced",
    "tft_train",
    "ttp_initialize_replica_dp_group",
]
