"""What a program sees of itself where the template runs it: what it would under the interpreter."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from acpfs.training.launcher import fast_saves

TIMEOUT_S = 60
PROGRAM = """
import json, pickle, sys, threading

path = __file__  # the interpreter takes it away behind the last line of a script

class Own:
    pass

def seen():
    threading.main_thread().join()
    assert type(pickle.loads(pickle.dumps(Own()))) is Own
    main = sys.modules["__main__"]
    print(json.dumps([
        main.__name__, path, main.__package__, getattr(main.__spec__, "name", None),
        type(main.__loader__).__name__, sys.argv, sys.path[0], main.Own is Own,
    ]))

threading.Thread(target=seen).start()
"""


def answers(words: list[str], directory: Path) -> list[object]:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=directory,
        timeout=TIMEOUT_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[object] = json.loads(done.stdout)
    return found


@pytest.mark.clause("T223")
@pytest.mark.parametrize("kind", ["script", "directory", "archive", "module", "package"])
def test_it_is_main_as_under_the_interpreter(tmp_path: Path, kind: str) -> None:
    """Also in a thread that goes on behind its last line."""
    (package := tmp_path / "package").mkdir()
    for path in (tmp_path / "script.py", package / "__main__.py"):
        path.write_text(PROGRAM, encoding="utf-8")
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", PROGRAM)
    words = {
        "script": ["script.py"],
        "directory": ["package"],
        "archive": ["archive.zip"],
        "module": ["-m", "script"],
        "package": ["-m", "package"],
    }[kind]
    words += ["--own", "word"]
    run = ["-c", f"import sys; sys.path.insert(0, {str(Path.cwd())!r}); {BEGUN}", *words]
    assert answers(run, tmp_path) == answers(words, tmp_path)


BEGUN = """
from acpfs.training.launcher import fast_saves
sys.argv[:1] = ["fast_saves.py"]
sys.path[:2] = [sys.path[1]]
fast_saves.main()
"""


@pytest.fixture
def torch_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Something that is called torch; how often the calls were replaced is what `installed` has."""
    (tmp_path / "torch").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    yield tmp_path / "torch" / "__init__.py"
    sys.modules.pop("torch", None)


@pytest.mark.clause("T223")
@pytest.mark.parametrize("before", ["nothing", "asked where it is", "failed to import it"])
def test_the_calls_are_replaced_whenever_torch_is_imported(
    torch_here: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    installed = list[str]()
    monkeypatch.setattr(fast_saves, "_install", lambda: installed.append("here"))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    known = list(sys.meta_path)
    fast_saves.arrange()
    torch_here.write_text("IS_WHOLE = True", encoding="utf-8")
    if before == "asked where it is":
        for _ in range(2):
            spec = importlib.util.find_spec("torch")
            assert spec is not None
            assert spec.loader is not None
            assert spec.loader.get_filename("torch") == str(torch_here)  # type: ignore[attr-defined]
    elif before == "failed to import it":
        torch_here.write_text("raise ImportError('not yet')", encoding="utf-8")
        with pytest.raises(ImportError, match="not yet"):
            importlib.import_module("torch")
        torch_here.write_text("IS_WHOLE = True  # and longer than it was", encoding="utf-8")
        importlib.invalidate_caches()
    assert installed == []
    assert importlib.import_module("torch").IS_WHOLE
    assert installed == ["here"]
    assert sys.meta_path == known
    assert type(sys.modules["torch"].__loader__).__name__ == "SourceFileLoader"
