"""A gasp gets its name: files compared with what was reported, `gasp.json`, rename, tracker last.

May be repeated by anybody. No torch.

After a kill at any point there is either no such name, or a whole checkpoint behind it; the next
attempt goes on from there.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from acpfs.logger import get_logger
from acpfs.training import mounted
from acpfs.training.manifest import GaspError, differences, read_manifest, write_manifest
from acpfs.training.messages import Manifest, Publish
from acpfs.training.naming import begun, keep_beside, remove_begun, write_tracker

log = get_logger(__name__)
LOOK_AGAIN_S = 0.05


def publish(
    save_directory: Path, order: Publish, tracker: str, files_s: float, text: str = "{name}"
) -> Path:
    """Do it; the checkpoint's path.

    `tracker`: a file that names the newest checkpoint, or nothing. `files_s`: so long files of
    other nodes may take. `text`: what the tracker says, with `{name}` or `{step}`.

    Raises:
        GaspError: the files are not those that were reported, or there are none.
        OSError: the directory cannot be written.
    """
    if not order.manifest.files:
        raise GaspError(f"{order.name}: nothing was written of it")
    written = save_directory / order.directory
    final = save_directory / order.name
    nodes = mounted.needed(order.manifest.nodes)
    if not _is_there(final, order):
        _wait_for_files(written, order, files_s)
        if _comes_from_elsewhere(final, order, files_s):
            shutil.rmtree(written)
        else:
            _give_name(written, final, order, nodes)
    if tracker:
        write_tracker(
            save_directory / tracker,
            text.format(name=order.name, step=order.manifest.step) + "\n",
            order.manifest,
        )
    if not order.elsewhere:  # else another node's may be on its way to a name
        remove_begun(
            save_directory, begun(order.manifest), order.manifest.generation, order.directory
        )
    return final


def _give_name(written: Path, final: Path, order: Publish, nodes: tuple[str, ...]) -> None:
    write_manifest(written, order.manifest)
    keep_beside(final, order.manifest)  # a checkpoint, perhaps half of one
    mounted.withdraw_urgent(written)
    mounted.set_needs(written, nodes)
    written.rename(final)


def _comes_from_elsewhere(final: Path, order: Publish, files_s: float) -> bool:
    """Whether an earlier generation's gasp of the same step has the name, given on another node by
    a rank that then died.

    What that node renamed is seen here when it is in the storage, with all its files. Two nodes
    that rename to one name are a conflict.
    """
    deadline = time.monotonic() + files_s
    while order.elsewhere:
        found = _manifest(final)
        if (
            found is not None
            and (found.job, found.step) == (order.manifest.job, order.manifest.step)
            and not differences(final, found.files)
        ):
            log.warning(
                "an earlier gasp of this step has the name",
                name=final.name,
                generation=found.generation,
            )
            return True
        if time.monotonic() >= deadline:
            break
        time.sleep(LOOK_AGAIN_S)
    return False


def _manifest(final: Path) -> Manifest | None:
    """Of what has the name. One that makes no sense is somebody else's, and is kept beside."""
    try:
        return read_manifest(final)
    except GaspError:
        return None


def _is_there(final: Path, order: Publish) -> bool:
    """Whether an earlier attempt did the rename."""
    found = _manifest(final)
    return found is not None and (found.job, found.generation, found.step) == (
        order.manifest.job,
        order.manifest.generation,
        order.manifest.step,
    )


def _wait_for_files(written: Path, order: Publish, files_s: float) -> None:
    """What other nodes wrote becomes visible here when it is in the storage."""
    deadline = time.monotonic() + (files_s if len(order.manifest.nodes) > 1 else 0.0)
    while wrong := differences(written, order.manifest.files):
        if time.monotonic() >= deadline:
            raise GaspError(f"{written}: {'; '.join(wrong)}")
        time.sleep(LOOK_AGAIN_S)
