"""What programs and people rely on from version to version, as it is in this checkout.

`python -m tests.formats.contract`, at each release, notes in contract.json what was added.
"""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from pathlib import Path

from acpfs import drain_records
from acpfs.cli.main import COMMANDS
from acpfs.config import FIELDS
from acpfs.control import metric_table, reports
from acpfs.control.verb_table import VERBS
from acpfs.errors import ExitCode
from acpfs.mounting.doctor import Finding
from acpfs.mounting.tier_salvage import Saved
from acpfs.training.drill import Verdict

PRINTED: tuple[type, ...] = (Finding, Saved, Verdict)
"""Records of commands that ask no mount."""
NOTED = Path(__file__).with_name("contract.json")
Contract = dict[str, list[str]]


def contract() -> Contract:
    """Kind → names."""
    records = [
        kind
        for module in (reports, drain_records)
        for kind in vars(module).values()
        if isinstance(kind, type) and is_dataclass(kind) and kind.__module__ == module.__name__
    ]
    return {
        "settings": sorted(FIELDS),
        "commands": sorted(COMMANDS),
        "verbs": sorted(VERBS),
        "arguments of verbs": sorted(
            f"{name} {taken}" for name, verb in VERBS.items() for taken in verb.takes
        ),
        "exit codes": [f"{int(code)} {code.name}" for code in ExitCode],
        "fields of JSON": sorted(
            f"{kind.__name__}.{field.name}" for kind in records for field in fields(kind)
        ),
        "fields of commands' JSON": sorted(
            f"{kind.__name__}.{field.name}" for kind in PRINTED for field in fields(kind)
        ),
        "metrics": sorted(metric_table.series()),
    }


def noted() -> Contract:
    """What was there once."""
    found: Contract = json.loads(NOTED.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    NOTED.write_text(json.dumps(contract(), indent=1) + "\n", encoding="utf-8")
