"""`CheckpointHelper` of the product: a rank's saves with the mount.

A save is done when it returns, since it lands in memory.

So nothing has to be waited for before the next update. One object per rank, as there.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from acpfs.compatible import checkpoint_files
from acpfs.compatible.refusal import UnsupportedError
from acpfs.errors import AcpfsError
from acpfs.logger import get_logger

log = get_logger("acpfs.compatible")
PATH_CHARS_MAX = 1024
CHECKER_S = 300
TRACKER = "latest_checkpointed_iteration.txt"


class CheckpointHelper:
    """Of one rank; `CheckpointHelper(rank)` is the same object each time."""

    _made: ClassVar[dict[int, CheckpointHelper]] = {}
    _making = threading.Lock()

    rank: int
    _saves: list[threading.Thread]

    def __new__(cls, rank: int) -> CheckpointHelper:
        with cls._making:
            if rank not in cls._made:
                made = super().__new__(cls)
                made.rank = rank
                made._saves = []
                cls._made[rank] = made
            return cls._made[rank]

    def async_write_tracker_file(
        self,
        iteration: int,
        iteration_dir: str,
        total_file_count: int,
        tracker_filename: str,
        callback: Callable[[int, int], Any] | None = None,
    ) -> None:
        """When so many files of the iteration are persisted, the tracker names it;
        `callback(iteration, result)`, 0 when it does.

        Raises:
            ValueError: the directory is not there, or a path is too long.
            AcpfsError: it lies in no mount.
        """
        _short(iteration_dir, tracker_filename)
        if not os.path.isdir(iteration_dir):
            raise ValueError("the iteration_dir is not a directory.")

        def checked(result: int, _context: object) -> None:
            if result == 0:
                try:
                    # not what a link of this name leads to: that may be a checkpoint
                    with checkpoint_files.create_file(os.path.abspath(tracker_filename)) as file:
                        file.write(str(iteration).encode())
                except OSError as error:
                    log.error(
                        "the tracker could not be written", path=tracker_filename, why=str(error)
                    )
                    result = -(error.errno or 1)
            if callback is not None:
                callback(iteration, result)

        if (
            checkpoint_files.register_checker(
                checked, {os.path.realpath(iteration_dir): total_file_count}, iteration, CHECKER_S
            )
            != 1
        ):
            raise AcpfsError(f"{iteration_dir} cannot be watched: it has to lie in an acpfs mount")

    def async_save_checkpoint(
        self, thread_func: Callable[..., Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Call it in a thread; `wait_d2h_finished` waits for it."""
        thread = threading.Thread(
            target=thread_func, kwargs=dict(kwargs), name=f"acpfs-save-{self.rank}"
        )
        self._saves.append(thread)
        thread.start()

    def async_checkpoint_count(self) -> None:
        """Nothing is counted: what copies is waited for by its thread."""

    def get_checkpoint_copy_stream(self) -> Any:
        """Refused: a stream of the device.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "get_checkpoint_copy_stream makes a stream of the NPU: save_model_checkpoint copies "
            "by itself here"
        )

    def save_model_checkpoint(
        self, checkpoint_name: str | list[str], model: dict[str, Any]
    ) -> None:
        """Save it under one name or several.

        Raises:
            OSError: it failed; the log says why.
        """
        self._save(checkpoint_name, model)

    def save_optimizer_checkpoint(
        self, checkpoint_name: str | list[str], get_parameter_state_func: Callable[..., Any]
    ) -> None:
        """Gather by the function, then save what it gives; None is nothing to save.

        It may take `notify_callback`.

        Raises:
            OSError: it failed; the log says why.
            ValueError: the function takes something else.
        """
        takes = inspect.signature(get_parameter_state_func).parameters
        if set(takes) - {"notify_callback"}:
            raise ValueError(
                "The name of get_parameter_state_func parameters should be 'notify_callback'"
            )
        state = (
            get_parameter_state_func(notify_callback=lambda: None)
            if takes
            else get_parameter_state_func()
        )
        if state is not None:
            self._save(checkpoint_name, state)

    def _save(self, checkpoint_name: str | list[str], state: Any) -> None:
        names = [checkpoint_name] if isinstance(checkpoint_name, str) else list(checkpoint_name)
        _short(*names)
        if checkpoint_files.multi_save(state, names) is None:
            raise OSError(f"rank {self.rank}: {names[0]} was not saved; the log says why")

    def wait_d2h_finished(self) -> None:
        """Wait for what `async_save_checkpoint` has begun."""
        while self._saves:
            thread = self._saves.pop()
            if thread.ident is not None:  # else a signal's handler raised before it was started
                thread.join()

    def async_preload(self, load_path: str) -> None:
        """Begin to bring the checkpoint that the tracker names to RAM.

        Raises:
            ValueError: there is no tracker.
        """
        _short(load_path)
        try:
            with open(os.path.join(load_path, TRACKER), encoding="ascii") as file:
                latest = file.read().strip()
        except OSError as error:
            raise ValueError(f"{load_path}: no {TRACKER}") from error
        name = "release" if latest == "release" else f"iter_{int(latest):07d}"
        directory = os.path.join(load_path, name)
        threading.Thread(
            target=checkpoint_files.preload, args=(directory,), name="acpfs-preload", daemon=True
        ).start()

    def load_model_checkpoint(
        self, checkpoint_name: str, load_rank: int, process_group: Any = None
    ) -> Any:
        """Load it; each rank by itself, from RAM.

        Raises:
            UnsupportedError: a process group is given.
        """
        _short(checkpoint_name)
        if load_rank < 0:
            raise ValueError("The load_rank should >= 0")
        if process_group is not None:
            raise UnsupportedError(
                "load_model_checkpoint does not broadcast: leave process_group out, and each "
                "rank reads from RAM"
            )
        return checkpoint_files.load(checkpoint_name, weights_only=False)


def _short(*paths: str) -> None:
    if any(len(path) > PATH_CHARS_MAX for path in paths):
        raise ValueError(f"the path length cannot exceed {PATH_CHARS_MAX} characters.")
