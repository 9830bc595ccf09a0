"""Stands with the guard on: applications delete the old checkpoint before they write the new one,
and one whole checkpoint is always there.

What the guard holds back makes the backing directory show more than the application had at that
moment (S6, S140): of each checkpoint the bytes of one version that was published, no more, no
mixture. Which versions there ever were is told by the application's journals.
"""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.drill import points, verdict
from tests.drill.history import File, History
from tests.drill.spec import HIDDEN, Tree, tree_of
from tests.drill.stand import GAUGES_TIMEOUT_S, Stand
from tests.drill.workloads import GUARDED_BYTES, GUARDED_FILES, is_guarded


class GuardStand(Stand):
    """See above."""

    death_points = sorted([*points.PLAIN_POINTS, *points.GUARD_POINTS * 6])
    """Those of the guard more often: each is passed once a round."""

    def __init__(
        self, base: Path, workload: str, transport: str, seed: int, **options: Any
    ) -> None:
        super().__init__(base, workload, transport, seed, **options)
        del self.mount.options["no_keep_last_persisted"]
        self._versions: dict[str, list[Tree]] = defaultdict(list)
        """Of each checkpoint, every form that was ever published: name below it ("": itself) →
        entry.
        """
        self._was_whole = False

    def begin(self) -> None:
        super().begin()
        self._remember(self.history)

    def _remember(self, history: History) -> None:
        for state in history.states:
            for top, form in by_checkpoint(state.tree).items():
                if is_guarded(top) and form not in self._versions[top]:
                    self._versions[top].append(form)

    def allows(self, seen: Tree, tree: Tree) -> bool:
        """Whether the backing directory may look so at a moment with that tree."""
        found = by_checkpoint(seen)
        had = by_checkpoint(tree)
        return all(
            self._allows(top, found.get(top, {}), had.get(top, {}))
            for top in found.keys() | had.keys()
        )

    def _allows(self, top: str, found: Tree, had: Tree) -> bool:
        if found == had:
            return True
        return had.items() <= found.items() and any(
            found.items() <= form.items() for form in self._versions.get(top, ())
        )

    def check_backing(self, when: str) -> list[str]:
        moment = time.monotonic()
        seen = tree_of(self.shown)
        possible = self.history.possible()
        self._remember(possible)
        start = max(possible.seen_at, possible.promised_until(moment))
        states = possible.states
        found = next(
            (
                index
                for index in range(start, len(states))
                if any(self.allows(seen, tree) for tree in states[index].trees)
            ),
            None,
        )
        losses = self.check_whole(seen, when)
        if found is None:
            earlier = [
                index
                for index in range(start)
                if any(self.allows(seen, tree) for tree in states[index].trees)
            ]
            what = (
                f"with what the guard holds this is one of states {earlier}"
                if earlier
                else "no state, whatever the guard holds"
            )
            strictly = verdict.check_published(
                self.history, seen, moment, f"backing directory {when}"
            )
            told = [f"{what}; {start} was seen or promised, of {len(states)}"] if strictly else []
            return [*losses, *strictly, *told]
        self.history.seen_at = min(found, len(self.history.states) - 1)
        return losses

    def check_whole(self, seen: Tree, when: str) -> list[str]:
        """From the first whole checkpoint on there is always one, perhaps where the guard moves
        what is in the way of a new one.
        """
        kept = [
            tree_of(path) for path in (self.shown / HIDDEN / "kept").glob("*/*") if path.is_dir()
        ]
        present = [form for top, form in by_checkpoint(seen).items() if is_guarded(top)]
        present += [{"": ("dir", ""), **form} for form in kept]
        known = [form for forms in self._versions.values() for form in forms]
        whole = any(is_whole(form) and form in known for form in present)
        lost = self._was_whole and not whole
        self._was_whole |= whole
        return (
            [
                (
                    f"backing directory {when}: no whole checkpoint lies there any more, but "
                    f"{sorted(seen)}"
                )
            ]
            if lost
            else []
        )

    def check_below(self, expected: Tree) -> list[str]:
        """What is held has gone, if there is a whole checkpoint that is newer."""
        self._remember(self.history)
        if self._has_newer():
            try:
                self.mount.wait_status(
                    lambda status: not status["guarded"] and not status["queue_length"],
                    GAUGES_TIMEOUT_S,
                )
            except TimeoutError as error:
                return [f"still held: {error}"]
            return super().check_below(expected) + self.check_whole(
                tree_of(self.shown), "after the drain"
            )
        seen = tree_of(self.shown)
        losses = self.check_whole(seen, "after the drain")
        return losses if self.allows(seen, expected) else losses + super().check_below(expected)

    def _has_newer(self) -> bool:
        sizes: dict[str, list[int]] = defaultdict(list)
        for path, node in self.history.nodes.items():
            top, _slash, name = path.partition("/")
            if is_guarded(top) and isinstance(node, File) and (not name or name in GUARDED_FILES):
                sizes[top].append(len(node.data or b""))
        return any(sum(found) == len(GUARDED_FILES) * GUARDED_BYTES for found in sizes.values())


def by_checkpoint(tree: Tree) -> dict[str, Tree]:
    """What lies in each entry of the top directory, by its name below it."""
    found: dict[str, Tree] = defaultdict(dict)
    for path, entry in tree.items():
        top, _slash, below = path.partition("/")
        found[top][below] = entry
    return found


def is_whole(form: Tree) -> bool:
    """A directory with all its files, or a file that got its final name."""
    return form[""][0] == "file" or all(
        form.get(name, ("", ""))[0] == "file" for name in GUARDED_FILES
    )
