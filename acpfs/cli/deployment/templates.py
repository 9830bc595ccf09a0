"""The templates below `acpfs/deploy`: text with `@{name}`, readable as what it will be.

Values are quoted as YAML where they need it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.resources import files
from string import Template
from typing import Any

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9/_.-]*")
_WORDS_OF_YAML = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n"})


class _At(Template):
    """`$` belongs to shells and to Kubernetes here."""

    delimiter = "@"


def filled(name: str, values: Mapping[str, object]) -> str:
    """A template with these values.

    Raises:
        KeyError: one is missing.
    """
    return _At((files("acpfs") / "deploy" / name).read_text(encoding="utf-8")).substitute(values)


def scalar(value: str) -> str:
    """A string as YAML has it: bare where it cannot be taken for anything else, else in quotes,
    which JSON and YAML share.
    """
    bare = _PLAIN.fullmatch(value) is not None and value.lower() not in _WORDS_OF_YAML
    return value if bare else json.dumps(value)


def toml(values: Mapping[str, Any]) -> str:
    """Settings as a file of acpfs has them: texts, numbers, truth values and lists of texts, which
    TOML writes as JSON does.
    """
    return "".join(
        f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in values.items()
    )


def indented(text: str, spaces: int) -> str:
    """Each line so far to the right, for a block of YAML."""
    return "\n".join(" " * spaces + line if line else "" for line in text.rstrip("\n").split("\n"))
