"""The log that scripts of the product write to as well: `ttp_logger.LOGGER`, to `logs/ttp_log.log`,
10 MB and five older ones.

What acpfs itself says of these modules (`acpfs.compatible`) is there, too. The file is made when a
controller or a processor begins.
"""

from __future__ import annotations

import logging
import logging.handlers
import os
from pathlib import Path

from acpfs.logger import FIELDS

PATH_VARIABLE = "TTP_LOG_PATH"
NAME = "ttp_log.log"
BYTES_MAX = 10 << 20
OLDER = 5
FORMAT = f"%(asctime)s %(process)d %(levelname)s %(name)s %(message)s %({FIELDS})s"
LOGGER = logging.getLogger("mindio_ttp")


def begin() -> None:
    """Write to the file from here on; a directory that cannot be written is told once, to where
    warnings go.
    """
    if LOGGER.handlers:
        return
    directory = Path(os.environ.get(PATH_VARIABLE) or "logs")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handler = logging.handlers.RotatingFileHandler(
            directory / NAME, maxBytes=BYTES_MAX, backupCount=OLDER, delay=True
        )
    except OSError as error:
        LOGGER.warning("no log in %s: %s", directory, error.strerror)
        return
    handler.setFormatter(
        logging.Formatter(
            "%(asctime)s %(process)d %(levelname)s %(name)s %(message)s %(acpfs_fields)s",
            defaults={"acpfs_fields": ""},
        )
    )
    for logger in (
        LOGGER,
        logging.getLogger("acpfs.compatible"),
        logging.getLogger("acpfs.training"),
    ):
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
