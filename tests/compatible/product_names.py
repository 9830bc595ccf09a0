"""Every public name of the product that scripts import, with its signature: taken from its
documents and from its callers.

A type of the product's annotation is left out; names, order and defaults are what callers depend
on.
"""

from __future__ import annotations

ACP = {
    "initialize": "server_info=None",
    "create_file": "path, mode=384",
    "open_file": "path",
    "save": "obj, path, open_way='memfs'",
    "multi_save": "obj, path_list",
    "register_checker": "callback, check_dict, user_context, timeout_sec",
    "load": "path, open_way='memfs', map_location=None, weights_only=True",
    "convert": "src, dst",
    "preload": "*path",
    "flush": "",
}
ACP_FILES = {
    "create_file": {"write": "data", "drop": "", "close": ""},
    "open_file": {"read": "offset=0, count=-1", "close": ""},
}
CHECKPOINT_HELPER = {
    "async_write_tracker_file": (
        "iteration, iteration_dir, total_file_count, tracker_filename, callback=None"
    ),
    "async_save_checkpoint": "thread_func, kwargs",
    "async_checkpoint_count": "",
    "get_checkpoint_copy_stream": "",
    "save_model_checkpoint": "checkpoint_name, model",
    "save_optimizer_checkpoint": "checkpoint_name, get_parameter_state_func",
    "wait_d2h_finished": "",
    "async_preload": "load_path",
    "load_model_checkpoint": "checkpoint_name, load_rank, process_group=None",
}
_HANDLER = "func, ctx=None"
_CONTROLLER = {
    "tft_init_controller": (
        "rank, world_size, enable_local_copy, enable_arf=False, enable_zit=False"
    ),
    "tft_start_controller": "bind_ip, port, enable_tls=True, tls_info=''",
    "tft_destroy_controller": "",
}
_UCE = {"tft_can_do_uce_repair": "hbm_error_time, start_time=None, end_time=None"}
FRAMEWORK = {
    **_CONTROLLER,
    "tft_init_processor": (
        "rank, world_size, enable_local_copy, enable_tls=True, tls_info='', enable_uce=True, "
        "enable_arf=False, enable_zit=False"
    ),
    "tft_start_processor": "master_ip, port, local_ip=''",
    "tft_destroy_processor": "",
    "tft_start_updating_os": "backup_step=-1",
    "tft_end_updating_os": "step",
    "tft_start_copy_os": "",
    "tft_set_step_args": "args",
    "tft_reset_limit_step": "",
    "tft_pause_train": "cur_step",
    "tft_report_load_ckpt_step": "step",
    "tft_set_optimizer_replica": "rank, replica_info",
    "tft_set_dp_group_info": "rank, dp_rank_list",
    "tft_register_save_ckpt_handler": _HANDLER,
    "tft_register_rename_handler": _HANDLER,
    "tft_register_exit_handler": _HANDLER,
    "tft_register_stop_handler": _HANDLER,
    "tft_register_clean_handler": _HANDLER,
    "tft_register_rebuild_group_handler": _HANDLER,
    "tft_register_repair_handler": _HANDLER,
    "tft_register_rollback_handler": _HANDLER,
    "tft_register_stream_sync_handler": _HANDLER,
    "tft_register_zit_upgrade_rollback_handler": _HANDLER,
    "tft_register_zit_upgrade_repair_handler": _HANDLER,
    "tft_register_zit_upgrade_rebuild_handler": _HANDLER,
    "tft_register_zit_downgrade_rebuild_handler": _HANDLER,
    "tft_register_decrypt_handler": "decryptor",
    "tft_register_exception_handler": "fault_pattern, fault_type, fault_handle",
    "tft_exception_handler": "func",
    "tft_report_error": "error_type, error_code=''",
    "tft_wait_next_action": "",
    "tft_get_repair_step": "",
    "tft_get_repair_type": "",
    "tft_is_reboot_node": "",
    "tft_get_reboot_type": "",
    "set_mindio_export_version": "framework_type",
    **_UCE,
}
DECORATOR = {**FRAMEWORK, "get_device": "", "get_mindio_export_version": ""}
CONTROLLER = {
    **_CONTROLLER,
    "tft_set_dp_group_info": "rank, dp_rank_list",
    "tft_register_mindx_callback": "action, func",
    "tft_notify_controller_dump": "",
    "tft_notify_controller_stop_train": "fault_ranks, stop_type='stop', timeout=None",
    "tft_notify_controller_on_global_rank": "fault_ranks, time=1",
    "tft_notify_controller_prepare_action": "action, fault_ranks=None",
    "tft_notify_controller_change_strategy": "strategy, params=''",
    "tft_query_high_availability_switch": "",
}
UTILS = {
    "tft_set_update_start_time": "start_time=None",
    "tft_set_update_end_time": "end_time=None",
    **_UCE,
}
ADAPTOR = {
    "tft_init_controller_processor": "enable_tls=True, tls_option_top_path=''",
    "tft_register_processor": "train_valid_test_dataset_provider, model_provider, model_type",
    "tft_train": "train_args, test_data_iterator_list",
    "ttp_initialize_replica_dp_group": (
        "pipeline_model_parallel_size, tensor_model_parallel_size, context_parallel_size, "
        "expert_model_parallel_size, world_size"
    ),
    "tft_set_losses_reduced": "losses_reduced",
    "tft_is_arf_reboot_node": "",
}
ENUMERATIONS = {
    "OptimizerType": {"ATTENTION": 0, "MOE": 1},
    "Action": {"RETRY": 0, "EXIT": 1},
    "ReportState": {
        "RS_NORMAL": 0,
        "RS_UCE": 1,
        "RS_UCE_CORRUPTED": 2,
        "RS_HCCL_FAILED": 3,
        "RS_INIT_FINISH": 4,
        "RS_PREREPAIR_FINISH": 5,
        "RS_STEP_FINISH": 6,
        "RS_UNKNOWN": 7,
        "RS_RETRY": 8,
    },
    "RepairType": {
        "RT_SEND": 0,
        "RT_UCE_HIGHLEVEL": 1,
        "RT_UCE_LOWLEVEL": 2,
        "RT_RECV_REPAIR": 3,
        "RT_ROLLBACK": 4,
        "RT_LOAD_CKPT": 5,
        "RT_LOAD_REBUILD": 6,
    },
}
TTP = {
    "mindio_ttp.framework_ttp": FRAMEWORK,
    "mindio_ttp.framework_ttp.ttp_decorator": DECORATOR,
    "mindio_ttp.controller_ttp": CONTROLLER,
    "mindio_ttp.utils": UTILS,
    "mindio_ttp.adaptor": ADAPTOR,
}
