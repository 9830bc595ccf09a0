"""`acpfs-ctl set`: change a setting of a mount that is in use."""

from __future__ import annotations

import click

from acpfs.cli import show
from acpfs.cli.target import Target, ask
from acpfs.cli.verbs.flush import JSON_OPTION
from acpfs.errors import ConfigError


@click.command("set")
@click.argument("assignments", nargs=-1, required=True, metavar="KEY=VALUE...")
@JSON_OPTION
@click.pass_obj
def command(target: Target, assignments: tuple[str, ...], as_json: bool) -> None:
    """Change a setting until the mount ends: `set streams=16`.

    One of bandwidth, streams, log_level, ram, when_full, keep_checkpoints, spill_budget and wait_for_peers.
    """
    record = target.record()
    pairs = [assignment.partition("=") for assignment in assignments]
    for key, equals, _value in pairs:
        if not equals:
            raise ConfigError(f"set: {key!r} is not KEY=VALUE")
    changed = {}
    for key, _equals, value in pairs:
        answer = ask(record, "set", {"key": key, "value": value}, as_json=as_json)
        changed[answer["key"]] = answer["value"]
        if not as_json:
            click.echo(f"{answer['key']} = {answer['value']}")
    if as_json:
        show.print_json(changed)
