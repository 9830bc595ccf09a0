"""Has `torch.save` and `torch.load` of a program be those of `acpfs.torch`, without a change to it.

Executed in place of the program (`python -m … [-m] PROGRAM ARGUMENTS`), or called by the template.
Imports no torch: where the program does, the two calls are replaced right behind that.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from acpfs.training.launcher import template

VARIABLE = "ACPFS_FAST_SAVES"
"""In the environment of a rank: whether it is to have them."""


def arrange() -> None:
    """Now, or as soon as torch has been imported."""
    if "torch" in sys.modules:
        _install()
    else:
        sys.meta_path.insert(0, _Finder())


def _install() -> None:
    importlib.import_module("acpfs.torch").install()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds torch as the others would, until it is there."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Loads torch, and then replaces the two calls."""

    def __init__(self, own: importlib.abc.Loader, finder: _Finder) -> None:
        self._own = own
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._own  # who asks torch for its files asks this one
        module.__loader__ = self._own
        self._own.exec_module(module)
        # Only now: whoever has only asked where torch is, or has failed to import it, may import
        # it later.
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self._finder)
        _install()

    def __getattr__(self, name: str) -> Any:
        """Who has found torch, and does not import it, asks for its path, or its code."""
        if name == "_own":  # of a copy that has none yet
            raise AttributeError(name)
        return getattr(self._own, name)


def main() -> None:
    """Entry point."""
    words = sys.argv[1:]
    is_module = words[0] == "-m"
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # where this was started from: `template.run` says what belongs there
    os.environ[VARIABLE] = "1"
    template.run({"program": words[is_module:], "module": is_module})


if __name__ == "__main__":
    main()
