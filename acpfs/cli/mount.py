"""`acpfs mount`: settings from file and options, checks, then a daemon in the background or in this
process.
"""

from __future__ import annotations

import os
import signal
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from acpfs.cli.file_names import FILE_PATH
from acpfs.config import FIELDS, Settings, descriptions, load_settings, option_name
from acpfs.errors import AcpfsError

if TYPE_CHECKING:
    from attrs import Attribute

ARGUMENTS = ("backing", "mountpoint")


def setting_options() -> list[click.Option]:
    """One option per setting, made from the schema."""
    return [_option(name, field) for name, field in FIELDS.items() if name not in ARGUMENTS]


def _option(name: str, field: Attribute[Any]) -> click.Option:
    flag = option_name(name)
    if field.type is bool:
        return click.Option([f"--{flag}/--no-{flag}", name], default=None)
    return click.Option([f"--{flag}", name], default=None, metavar=_metavar(name, field))


class DescribedCommand(click.Command):
    """Says what its options are when it is asked: the text is looked up only then."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.describe()
        super().format_options(ctx, formatter)

    def describe(self) -> None:
        """Give each option its text: the first paragraph of the setting's description."""
        known = descriptions()
        for option in self.params:
            if isinstance(option, click.Option) and option.name in known:
                first = known[option.name].partition("\n\n")[0]
                option.help = " ".join(first.split()) + _default(FIELDS[option.name])


def _default(field: Attribute[Any]) -> str:
    default = field.default
    if isinstance(default, bool):
        default = "yes" if default else "no"
    elif isinstance(default, Enum):
        default = default.value
    elif isinstance(default, tuple):
        default = "a list, `acpfs-ctl config` shows it"
    return "" if default is None else f" [default: {default}]"


def _metavar(name: str, field: Attribute[Any]) -> str:
    if isinstance(field.type, type) and issubclass(field.type, Enum):
        return "|".join(member.value for member in field.type)
    if name.endswith("_s"):
        return "SECONDS"
    return {
        "ram": "SIZE",
        "prefault": "SIZE",
        "numa": "POLICY",
        "bandwidth": "SIZE",
        "log_file": "FILE",
        "metrics_file": "FILE",
        "runtime_dir": "DIR",
        "spill": "DIR",
        "spill_budget": "SIZE",
    }.get(name, "VALUE")


def mount(
    values: dict[str, Any],
    config: Path | None,
    *,
    foreground: bool,
    take_over: bool = False,
    instance: str = "",
) -> int:
    """Mount with these settings; the exit code."""
    settings = load_settings(values, config)
    from acpfs.mounting import starting

    if foreground:
        starting.run_foreground(starting.prepare(settings, take_over=take_over, instance=instance))
    starting.start(lambda: starting.prepare(settings, take_over=take_over, instance=instance))
    # from here on there is a mount: an end by this key would say that there is none
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if slower := lane_taken(settings):
        click.echo(slower, err=True)
    return 0


def lane_taken(settings: Settings) -> str:
    """One line where files of a new mount do not go the fast way; "" where they do, or where
    nobody says so in time: the mount is there all the same.
    """
    from acpfs.cli.verbs.status import PASSTHROUGH
    from acpfs.control import client, registry

    mountpoint = registry.normalised(os.fspath(settings.mountpoint))
    try:
        known = registry.records([settings.runtime_dir] if settings.runtime_dir else None)
        status = client.request(registry.find(mountpoint, known), "status", {})
    except AcpfsError:
        return ""
    if PASSTHROUGH in status["lanes"]:
        return ""
    from acpfs.mounting.doctor import THROUGH_DAEMON

    return (
        f"{mountpoint}: files go in the lane {', '.join(status['lanes'])}: the daemon moves their "
        f"bytes, and {THROUGH_DAEMON} as in passthrough, which root has from Linux 6.9 on; "
        "`acpfs doctor` says more"
    )


@click.command(
    "mount",
    cls=DescribedCommand,
    params=[
        click.Argument(
            ["backing"], required=False, type=FILE_PATH
        ),  # click.Path would stat them: one may hang,
        click.Argument(
            ["mountpoint"], required=False, type=str
        ),  # the other wait for whoever is to serve it
        click.Option(
            ["--config"],
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Read settings from this TOML file; options override it.",
        ),
        click.Option(
            ["--foreground"],
            is_flag=True,
            help="Stay in the foreground, log to stderr, notify the service manager.",
        ),
        click.Option(
            ["--take-over"],
            is_flag=True,
            help="Take over a mount that exists, from the process that serves it.",
        ),
        click.Option(
            ["--instance"],
            default="",
            metavar="NAME",
            help="Who mounts (a pod's uid): not given a mount taken from it.",
        ),
        *setting_options(),
    ],
)
def command(
    config: Path | None, foreground: bool, take_over: bool, instance: str, **options: Any
) -> int:
    """Mount BACKING on MOUNTPOINT; returns when the mount is ready to use, or fails with one line
    that says why.

    Sizes are bytes or 512M, 64G …; ram also takes a share such as 25%. BACKING and MOUNTPOINT may
    come from the configuration file.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if config is None and not given.keys() >= set(ARGUMENTS):
        raise click.UsageError("name BACKING and MOUNTPOINT, or a --config FILE that has them")
    return mount(given, config, foreground=foreground, take_over=take_over, instance=instance)
