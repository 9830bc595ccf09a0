"""`acpfs convert`: checkpoints that MindIO saved, as plain torch files."""

from __future__ import annotations

from pathlib import Path

import click

from acpfs.cli.file_names import FILE_PATH
from acpfs.compatible.product_container import convert
from acpfs.errors import AcpfsError


@click.command("convert")
@click.argument("source", type=FILE_PATH)
@click.argument("target", type=FILE_PATH)
def command(source: Path, target: Path) -> None:
    """Write SOURCE, a file in MindIO's own format, as TARGET, a file that torch.load reads.

    Needs no torch and no mount.
    """
    try:
        convert(source, target)
    except OSError as error:
        raise AcpfsError(f"{error.filename or source}: {error.strerror}") from error
