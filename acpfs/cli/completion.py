"""`acpfs completion`: what a shell needs to complete the commands of acpfs; click does the work."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

PROGRAMS = ("acpfs", "acpfs-ctl", "acpfs-train")


def script(program: str, shell: str) -> str:
    """What click gives for `shell`, which asks `program` for words."""
    kind = get_completion_class(shell)
    assert kind is not None
    return kind(
        click.Command(program), {}, program, f"_{program.replace('-', '_').upper()}_COMPLETE"
    ).source()


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print what SHELL needs to complete acpfs, acpfs-ctl and acpfs-train.

    \b
    bash:  acpfs completion bash >/etc/bash_completion.d/acpfs
    zsh:   acpfs completion zsh >"${fpath[1]}/_acpfs"
    fish:  acpfs completion fish >~/.config/fish/completions/acpfs.fish
    """  # noqa: D301 - the character itself tells click not to wrap what follows
    click.echo("\n".join(script(program, shell) for program in PROGRAMS))
