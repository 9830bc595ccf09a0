"""Parameters that are paths: a shell completes them, and nothing looks at the file, which may
hang.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:  # generic since click 8.2 or so, and for type checkers only
    ParamType = click.ParamType


class FileName(ParamType):
    """A path as text, as it is sent to a daemon."""

    name = "path"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The shell's own completion of file names."""
        return [CompletionItem(incomplete, type="file")]


class FilePath(FileName):
    """A path as a `Path`; `click.Path` would stat it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        return Path(value)


FILE_NAME = FileName()
FILE_PATH = FilePath()
