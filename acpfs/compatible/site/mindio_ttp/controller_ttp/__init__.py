"""What the cluster's agent and MindSpore call."""

from acpfs.compatible import product_log as ttp_logger
from acpfs.compatible.framework import (
    tft_destroy_controller,
    tft_init_controller,
    tft_notify_controller_change_strategy,
    tft_notify_controller_dump,
    tft_notify_controller_on_global_rank,
    tft_notify_controller_prepare_action,
    tft_notify_controller_stop_train,
    tft_query_high_availability_switch,
    tft_register_mindx_callback,
    tft_set_dp_group_info,
    tft_start_controller,
)

__all__ = [
    "tft_destroy_controller",
    "tft_init_controller",
    "tft_notify_controller_change_strategy",
    "tft_notify_controller_dump",
    "tft_notify_controller_on_global_rank",
    "tft_notify_controller_prepare_action",
    "tft_notify_controller_stop_train",
    "tft_query_high_availability_switch",
    "tft_register_mindx_callback",
    "tft_set_dp_group_info",
    "tft_start_controller",
    "ttp_logger",
]
