"""An import is not broken off: what is left of one that was would fail for ever."""

from __future__ import annotations

import importlib
import sys
import threading
from pathlib import Path

import pytest

from acpfs.training.interrupt import importing

HERE = threading.Event()
GO_ON = threading.Event()


def loop() -> None:
    importlib.import_module("module_that_waits")


@pytest.mark.clause("T85")
def test_a_thread_in_an_import_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_that_waits.py").write_text(
        f"from {__name__} import GO_ON, HERE\nHERE.set()\nGO_ON.wait(60)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    thread = threading.Thread(target=loop)
    thread.start()
    assert thread.ident is not None
    assert HERE.wait(60)
    seen = (
        importing(thread.ident, test_a_thread_in_an_import_is_seen.__code__),
        importing(threading.get_ident(), loop.__code__),
    )
    GO_ON.set()
    thread.join(60)
    assert seen == (True, False)
    assert not importing(thread.ident, loop.__code__)
    sys.modules.pop("module_that_waits", None)
