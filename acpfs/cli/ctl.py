"""`acpfs-ctl [MOUNTPOINT] VERB …`: talks to a mount's daemon through its control socket, never through the mount.

MOUNTPOINT may be left out when there is only one mount, or when the paths say it.
"""

from __future__ import annotations

from typing import NoReturn

import click

from acpfs import __version__
from acpfs.cli.lazy import LazyGroup, run
from acpfs.cli.target import Target

VERBS = {
    "status": ("acpfs.cli.verbs.status", "What is not yet safe, and why; RAM tier, queue, health."),
    "flush": ("acpfs.cli.verbs.flush", "Return when all that is complete now is persisted."),
    "wait": ("acpfs.cli.verbs.wait", "Return when these paths are persisted, or verified."),
    "checkpoints": ("acpfs.cli.verbs.checkpoints", "Each checkpoint: saved, persisted, where it loads from."),
    "ls": ("acpfs.cli.verbs.ls", "State of each file in the RAM tier or the queue."),
    "verify": ("acpfs.cli.verbs.verify", "Read the backing directory and compare with the recorded checksums."),
    "repair": ("acpfs.cli.verbs.repair", "Write what `verify` finds bad once more, from RAM where RAM still has it."),
    "doctor": ("acpfs.cli.verbs.doctor", "Look whether the mount's own state is as it must be."),
    "retry": ("acpfs.cli.verbs.retry", "Try again what failed, now."),
    "discard": ("acpfs.cli.verbs.discard", "Give up what the backing directory refused for good, with its data."),
    "release": ("acpfs.cli.verbs.release", "Carry out deletions of checkpoints that are held back."),
    "bypass": ("acpfs.cli.verbs.bypass", "Take the mount away: new opens reach the backing directory itself."),
    "reload": ("acpfs.cli.verbs.reload", "Have the code as it is installed now take over, without unmounting."),
    "preload": ("acpfs.cli.verbs.preload", "Bring files or checkpoints to RAM before they are read."),
    "pin": ("acpfs.cli.verbs.pin", "Keep what lies at and below paths in RAM, now and later."),
    "unpin": ("acpfs.cli.verbs.unpin", "Take pins off."),
    "urgent": ("acpfs.cli.verbs.urgent", "Give files below a directory the reserve of RAM, for an hour at most."),
    "evict": ("acpfs.cli.verbs.evict", "Let what is clean leave RAM now."),
    "nodes": ("acpfs.cli.verbs.nodes", "The mounts that share the backing directory; `nodes forget NODE` goes on without one."),
    "config": ("acpfs.cli.verbs.config", "Effective settings."),
    "set": (
        "acpfs.cli.verbs.set",
        "Change bandwidth, streams, log_level, ram, when_full, keep_checkpoints, spill_budget, wait_for_peers or reserve.",
    ),
    "metrics": ("acpfs.cli.verbs.metrics", "Prometheus metrics as text."),
}


class VerbGroup(LazyGroup):
    """Takes an optional mount point in front of the verb."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.obj = Target(None)
        first = next((index for index, word in enumerate(args) if not word.startswith("-")), None)
        if first is not None and args[first] not in VERBS and self._is_mountpoint(args, first):
            ctx.obj = Target(args[first])
            args = args[:first] + args[first + 1 :]
        return super().parse_args(ctx, args)

    @staticmethod
    def _is_mountpoint(args: list[str], index: int) -> bool:
        """A word that is no verb is a mount point where it looks like a path, or a verb follows; else it is a mistyped verb."""
        following = args[index + 1] if index + 1 < len(args) else ""
        return "/" in args[index] or args[index] in (".", "..") or following in VERBS


@click.group(
    cls=VerbGroup,
    lazy=VERBS,
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
