"""Mount namespaces for tests.

A new one has copies of all mounts of the machine, also of those of the tests that run beside this
one: whoever unmounts them would wait for its end. So the first that is done in it is to let go of
them.
"""

from __future__ import annotations

from pathlib import Path

LET_GO = """
while read -r _ at kind _; do
    if [ "$kind" = fuse.acpfs ] && [ "$at" != "$KEPT" ]; then umount -i -c -l "$at" || true; fi
done </proc/self/mounts
"""
"""In sh: of all mounts of acpfs but the one at $KEPT.

Without a question to any of them: one of them may hang.
"""


def namespace(*words: str, kept: Path | None = None, options: tuple[str, ...] = ()) -> list[str]:
    """The command that runs another one in a mount namespace of its own, which has of acpfs the
    mount at `kept`, or none.

    `options`: of unshare(1), for more namespaces.
    """
    script = f'KEPT=$0\n{LET_GO}exec "$@"'
    return [
        "unshare",
        "--mount",
        "--propagation",
        "private",
        *options,
        "sh",
        "-c",
        script,
        str(kept or ""),
        *words,
    ]
