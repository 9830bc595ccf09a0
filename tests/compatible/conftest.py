"""The packages of the product's names, imported as a script does."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from acpfs.compatible.places import SITE


@pytest.fixture
def product(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of the product's names; all of them are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(SITE))
    yield importlib.import_module
    for name in [
        name for name in sys.modules if name.split(".")[0] in ("mindio_acp", "mindio_ttp")
    ]:
        del sys.modules[name]


def signature(function: Callable[..., object]) -> str:
    """Names, order and defaults, without `self` and without types."""
    parameters = [
        p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()
    ]
    return ", ".join(str(parameter) for parameter in parameters if parameter.name != "self")
