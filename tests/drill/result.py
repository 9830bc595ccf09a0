"""What was tried and what was lost: gathered from all stands, shown as a table, kept as JSON and
Markdown.
"""

from __future__ import annotations

import json
import platform
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.table import Table


class Result:
    """Thread-safe; one for a whole run."""

    def __init__(self, seed: int, **settings: Any) -> None:
        self.seed = seed
        self.settings = settings
        self.tried: Counter[tuple[str, str]] = Counter()
        self.lost: Counter[tuple[str, str]] = Counter()
        self.points: Counter[str] = Counter()
        self.losses: list[dict[str, Any]] = []
        self.transports: Counter[str] = Counter()
        self.stands: Counter[str] = Counter()
        """Kills by kind of stand, of those at which an application was at work."""
        self.writing: list[int] = []
        """Of each kill at which a file was being written: bytes that went into it until its close,
        or its writer's end.
        """
        self.remarks: list[str] = []
        """What else is worth keeping, a sentence each."""
        self._lock = threading.Lock()
        self._began = time.monotonic()

    @property
    def kills(self) -> int:
        """How often something was killed or taken away."""
        with self._lock:
            return sum(
                count for (fault, _workload), count in self.tried.items() if "instants" not in fault
            )

    def note(
        self,
        fault: str,
        workload: str,
        losses: list[str],
        *,
        times: int = 1,
        point: str = "",
        **where: Any,
    ) -> None:
        """A fault was tried `times` times on a workload, and this was lost."""
        with self._lock:
            self.tried[fault, workload] += times
            self.lost[fault, workload] += len(losses)
            if "transport" in where:
                self.transports[str(where["transport"])] += times
            if point:
                self.points[point] += 1
            for loss in losses:
                self.losses.append(
                    {
                        "fault": fault,
                        "workload": workload,
                        "point": point,
                        "loss": loss,
                        "seed": self.seed,
                        **where,
                    }
                )

    def note_writing(self, stand: str, writing: list[int | None]) -> None:
        """Of each kill during work: bytes of the largest file that was being written, or None."""
        with self._lock:
            self.stands[stand] += len(writing)
            self.writing += [size for size in writing if size is not None]

    def add(self, kept: dict[str, Any]) -> None:
        """Count what another run brought, as `to_json` has it, to this one."""
        for row in kept["rows"]:
            self.tried[row["fault"], row["workload"]] += row["tried"]
            self.lost[row["fault"], row["workload"]] += row["losses"]
        self.points.update(kept["points"])
        self.transports.update(kept.get("transports", {}))
        self.stands.update(kept.get("stands", {}))
        self.writing += kept.get("writing", [])
        self.losses += kept["losses"]
        self.remarks += [
            *kept.get("remarks", []),
            f"seed {kept['seed']}: {kept['kills']} kills in {kept['seconds']:.0f} s",
        ]

    def to_json(self) -> dict[str, Any]:
        """Everything."""
        rows = [
            {"fault": f, "workload": w, "tried": n, "losses": self.lost[f, w]}
            for (f, w), n in sorted(self.tried.items())
        ]
        return {
            "seed": self.seed,
            "settings": self.settings,
            "kernel": platform.release(),
            "seconds": round(time.monotonic() - self._began, 1),
            "kills": self.kills,
            "losses": self.losses,
            "rows": rows,
            "points": dict(sorted(self.points.items())),
            "transports": dict(sorted(self.transports.items())),
            "stands": dict(sorted(self.stands.items())),
            "writing": sorted(self.writing),
            "remarks": self.remarks,
        }

    def table(self) -> Table:
        """fault × workload × tried × losses."""
        table = Table("fault", "workload", "tried", "losses", title=f"drill, seed {self.seed}")
        for (fault, workload), tried in sorted(self.tried.items()):
            lost = self.lost[fault, workload]
            table.add_row(fault, workload, str(tried), f"[bold red]{lost}" if lost else "0")
        table.add_section()
        table.add_row("all kills", "", str(self.kills), str(len(self.losses)))
        return table

    def was_written(self) -> str:
        """At how many kills something was being written, in words."""
        sizes = sorted(self.writing)
        stands = ", ".join(f"{name} {count}" for name, count in sorted(self.stands.items()))
        told = (
            f"Something was being written at {len(sizes)} of {self.stands.total()} kills during "
            f"work ({stands})"
        )
        return told + (
            f": files of {sizes[0] / 1e6:.1f} to {sizes[-1] / 1e6:.1f} MB, half of "
            f"{sizes[len(sizes) // 2] / 1e6:.1f} or more."
            if sizes
            else "."
        )

    def save(self, base: Path) -> None:
        """`base`.json and `base`.md."""
        found = self.to_json()
        base.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        lines = [
            "# Drill",
            "",
            (
                f"Seed {self.seed}, {found['seconds']:.0f} s, Linux {found['kernel']}: "
                f"**{found['kills']} kills, {len(self.losses)} losses**."
            ),
            (
                f"Workers died at {len(self.points)} different fault points. What is done and "
                "checked: docs/CONFORMANCE.md, Drill."
            ),
            "",
            "| fault | workload | tried | losses |",
            "|---|---|---|---|",
            *(
                f"| {row['fault']} | {row['workload']} | {row['tried']} | {row['losses']} |"
                for row in found["rows"]
            ),
            "",
            *(
                [
                    "By transport: "
                    + ", ".join(
                        f"{name} {count}" for name, count in sorted(self.transports.items())
                    )
                    + ".",
                    "",
                ]
                if self.transports
                else []
            ),
            *([self.was_written(), ""] if self.stands else []),
            *(f"* {remark}" for remark in self.remarks),
            *(
                f"* {entry['fault']}, {entry['workload']}, {entry['point']}: {entry['loss']}"
                for entry in self.losses[:20]
            ),
        ]
        base.with_suffix(".md").write_text("\n".join(lines).rstrip() + "\n")
