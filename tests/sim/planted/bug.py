"""A known defect, and the lines to plant it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Bug:
    """One defect."""

    name: str
    what: str
    """What the code does then."""
    file: str
    old: str
    new: str
    profiles: tuple[str, ...] = ("plain", "session")
    also: tuple[tuple[str, str], ...] = ()
    """Other lines of the file that go with these: old ones, new ones."""
    everywhere: bool = False
    """Each time that the old lines are there, not only the first."""
    equivalent: str = ""
    """Why nobody can notice it: the line that covers it."""
    unreached: str = ""
    """Why no history comes there, and which test does."""
    unjudged: str = ""
    """Why no oracle sees it, and which test does."""

    @property
    def why_not(self) -> str:
        """Why it need not be found; "": it must be."""
        words = ("equivalent", "unreached", "unjudged")
        return "; ".join(f"{word}: {why}" for word in words if (why := getattr(self, word)))

    def plant(self, tree: Path) -> bool:
        """Whether the sources in the tree still have the place."""
        path = tree / "acpfs" / self.file
        text = path.read_text(encoding="utf-8")
        for old, new in ((self.old, self.new), *self.also):
            if old not in text:
                return False
            text = text.replace(old, new, -1 if self.everywhere else 1)
        path.write_text(text, encoding="utf-8")
        return True
