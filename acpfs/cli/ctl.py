"""`acpfs-ctl [MOUNTPOINT] VERB …`: talks to a mount's daemon through its control socket, never
through the mount.

MOUNTPOINT may be left out when there is only one mount, or when the paths say it.
"""

from __future__ import annotations

from typing import NoReturn

import click

from acpfs import __version__
from acpfs.cli.lazy import LazyGroup, run
from acpfs.cli.target import Target
from acpfs.control.verb_table import VERBS

COMMANDS = {
    name: (f"acpfs.cli.verbs.{name}", verb.help) for name, verb in VERBS.items() if verb.help
}


class VerbGroup(LazyGroup):
    """Takes an optional mount point in front of the verb."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.obj = Target(None)
        first = next((index for index, word in enumerate(args) if not word.startswith("-")), None)
        if first is not None and args[first] not in COMMANDS and self._is_mountpoint(args, first):
            ctx.obj = Target(args[first])
            args = args[:first] + args[first + 1 :]
        return super().parse_args(ctx, args)

    @staticmethod
    def _is_mountpoint(args: list[str], index: int) -> bool:
        """A word that is no verb is a mount point where it looks like a path, or a verb follows;
        else it is a mistyped verb.
        """
        following = args[index + 1] if index + 1 < len(args) else ""
        return "/" in args[index] or args[index] in (".", "..") or following in COMMANDS


@click.group(
    cls=VerbGroup,
    lazy=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
    subcommand_metavar="[MOUNTPOINT] VERB [ARGS]...",
    options_metavar="",
)
@click.version_option(__version__, prog_name="acpfs-ctl")
def command() -> None:
    """Look at an acpfs mount and steer it. MOUNTPOINT may be left out when there is only one."""


def main() -> NoReturn:
    """Entry point."""
    run(command, "acpfs-ctl")


if __name__ == "__main__":
    main()
