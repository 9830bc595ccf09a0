"""Every public name of the product that scripts import, with its signature: taken from its documents and from its callers.

A type of the product's annotation is left out; names, order and defaults are what callers depend on.
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
    "async_write_tracker_file": "iteration, iteration_dir, total_file_count, tracker_filename, callback=None",
    "async_save_checkpoint": "thread_func, kwargs",
    "async_checkpoint_count": "",
    "get_checkpoint_copy_stream": "",
    "save_model_checkpoint": "checkpoint_name, model",
    "save_optimizer_checkpoint": "checkpoint_name, get_parameter_state_func",
    "wait_d2h_finished": "",
    "async_preload": "load_path",
    "load_model_checkpoint": "checkpoint_name, load_rank, process_group=None",
}
