"""`--cache DIR`: compile and kernel caches in the mount, pinned, so that a restart compiles nothing
and reads from RAM.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from acpfs.control import client, registry
from acpfs.errors import AcpfsError
from acpfs.logger import get_logger

log = get_logger(__name__)
VARIABLES: Mapping[str, str] = {
    "MS_COMPILER_CACHE_PATH": "mindspore",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "ASCEND_CACHE_PATH": "ascend",
    "CUDA_CACHE_PATH": "cuda",
}
"""Variable → directory below DIR. MindSpore makes one per rank in its own."""
SWITCHES: Mapping[str, str] = {"MS_COMPILER_CACHE_ENABLE": "1", "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}


def variables_for(directory: Path, outside: Mapping[str, str]) -> dict[str, str]:
    """Directories made, and the variables that name them; what the environment `outside` says
    already stays.

    Raises:
        OSError: a directory cannot be made.
    """
    added = {name: value for name, value in SWITCHES.items() if name not in outside}
    for name, below in VARIABLES.items():
        if name not in outside:
            (directory / below).mkdir(parents=True, exist_ok=True)
            added[name] = str(directory / below)
    return added


def keep_in_ram(directory: Path) -> bool:
    """Pin it in the mount.

    False: it is in none, or the mount would rather not; then caches are as fast as what they lie
    on.
    """
    try:
        record, below = registry.locate(str(directory))
        client.request(record, "pin", {"paths": [below]})
    except (AcpfsError, OSError) as error:
        log.warning("the caches are not pinned", directory=str(directory), error=str(error))
        return False
    return True
