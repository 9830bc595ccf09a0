"""Where others call acpfs in a training process: all such places are here, and each goes through
the guard.

`ranks/test_guard.py` lets all that they reach fail; a place that no loop there comes to is listed
with who looks at it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from acpfs import compatible, training

pytestmark = pytest.mark.clause("T178")
TREES = [Path(package.__file__ or "").parent for package in (training, compatible)]
IN_A_LOOP = {
    "hooks.py:_before",
    "hooks.py:_after",
    "held_signals.py:_note",
    "protection.py:_terminated",
    "protection.py:_last_net",
    "lightning.py:on_train_end",
    "lightning.py:on_exception",
    "lightning.py:on_validation_start",
    "lightning.py:on_validation_end",
    "lightning.py:on_train_batch_start",
    "lightning.py:state_dict",
    "lightning.py:load_state_dict",
    "transformers.py:on_train_end",
    "transformers.py:_protected_train",
    "transformers.py:_long_evaluate",
    "framework.py:_note_signal",
    "framework.py:wrapper",
    "framework.py:tft_start_updating_os",
    "framework.py:tft_end_updating_os",
    "framework.py:tft_report_error",
    "framework.py:tft_wait_next_action",
    "framework.py:tft_destroy_processor",
}
OF_THE_PRODUCT = {
    "wrapper",
    "tft_start_updating_os",
    "tft_end_updating_os",
    "tft_report_error",
    "tft_wait_next_action",
    "tft_destroy_processor",
}
"""What a train function of the product's scripts calls, beside getters and what sets one value."""
SAYS_ON_PURPOSE = {
    "lightning.py:on_train_start": "protection begins",
    "transformers.py:on_train_begin": "protection begins",
}
ONLY_HANDS_ON = {
    "held_signals.py:_note": "one assignment",
    "lightning.py:load_state_dict": "one assignment",
    "transformers.py:_protected_train": "leaves `Protection`, which has the guard",
    "transformers.py:_long_evaluate": "`long_operation`, which has the guard",
    "transformers.py:on_train_end": "leaves `Protection`",
    "lightning.py:on_train_end": "leaves `Protection`",
    "lightning.py:on_exception": "leaves `Protection`",
    "hooks.py:_before": "in step with other ranks; `begin` has the guard",
    "hooks.py:_after": "in step with other ranks; `end` has the guard",
}


def functions() -> Iterator[tuple[str, ast.FunctionDef, str]]:
    """Each with the file, and the bases of its class."""
    for tree in TREES:
        for path in sorted(tree.rglob("*.py")):
            if tree / "coordinator" in path.parents or tree / "launcher" in path.parents:
                continue  # processes of acpfs's own
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                bases = ""
                if isinstance(node, ast.ClassDef):
                    bases = " ".join(map(ast.unparse, node.bases))
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.FunctionDef):
                        yield path.name, child, bases


def handed_over(node: ast.AST) -> Iterator[ast.expr]:
    """Functions of acpfs that others call from here on."""
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        if called.rpartition(".")[2].startswith("register_step"):
            yield node.args[0]
        elif called == "signal.signal":
            yield node.args[1]
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            names = ast.unparse(target)
            if names == "sys.excepthook" or names.startswith(("trainer.", "(trainer.")):
                yield from node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]


def ways_in() -> set[str]:
    found: set[str] = set()
    for file, function, bases in functions():
        if "Callback" in bases and not function.name.startswith("_"):
            found.add(f"{file}:{function.name}")
        if function.name in OF_THE_PRODUCT:
            found.add(f"{file}:{function.name}")
        for node in ast.walk(function):
            for value in handed_over(node):
                if isinstance(value, ast.Attribute) and ast.unparse(value).startswith("self._"):
                    found.add(f"{file}:{value.attr}")
                elif isinstance(value, ast.Name) and value.id.startswith("_"):
                    found.add(f"{file}:{value.id}")
                elif isinstance(value, ast.Lambda):
                    found.add(f"{file}:lambda")
    return found


def test_all_places_at_which_others_call_acpfs_in_a_loop_are_known() -> None:
    assert ways_in() == IN_A_LOOP | SAYS_ON_PURPOSE.keys()


def test_each_of_them_goes_through_the_guard() -> None:
    guarded = {
        f"{file}:{function.name}"
        for file, function, _ in functions()
        if "guard.ours(" in ast.unparse(function) or "guard.last(" in ast.unparse(function)
    }
    assert IN_A_LOOP - ONLY_HANDS_ON.keys() <= guarded
