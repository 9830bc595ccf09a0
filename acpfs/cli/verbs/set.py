"""`acpfs-ctl set`: change a setting of a mount that is in use."""

from __future__ import annotations

import click

from acpfs.cli import show
from acpfs.cli.target import Target, ask
from acpfs.cli.verbs.flush import JSON_OPTION
from acpfs.config import CHANGEABLE
from acpfs.errors import ConfigError

HELP = f"""Change a setting until the mount ends: `set streams=16`.

One of {", ".join(name.removesuffix("_s") for name in CHANGEABLE)}.
"""


@click.command("set", help=HELP)
@click.argument("assignments", nargs=-1, required=True, metavar="KEY=VALUE...")
@JSON_OPTION
@click.pass_obj
def command(target: Target, assignments: tuple[str, ...], as_json: bool) -> None:
    """See `HELP`."""
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
