"""How a command runs: subcommands are imported when they are named, and errors become one line and
an exit code.

A user's error never shows a traceback; a bug does, because then the traceback is the message.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import NoReturn

import click

from acpfs.errors import AcpfsError, ExitCode

INTERRUPTED = 130
"""Exit code of a command ended by SIGINT, as shells have it."""


class LazyGroup(click.Group):
    """A group whose commands are `module:attribute`, with a line of help each."""

    def __init__(self, *args: object, lazy: dict[str, tuple[str, str]], **kwargs: object) -> None:
        """`lazy`: command → (module, help line); each module has a `command`."""
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._lazy:
            return None
        command = importlib.import_module(self._lazy[cmd_name][0]).command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_module, text) in self._lazy.items()])


def run(command: click.Command, name: str) -> NoReturn:
    """Run a command line and leave with its exit code."""
    try:
        code = command.main(prog_name=name, standalone_mode=False)
        sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.Exit as leave:
        sys.exit(leave.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except AcpfsError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(int(error.exit_code))
    except (KeyboardInterrupt, click.Abort):
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), 1
        )  # what the interpreter still wants to flush goes nowhere
        sys.exit(int(ExitCode.OK))
