"""The native transport for somebody without privileges: mounted by fusermount3, which sends the
session's descriptor.

In a mount namespace of its own, where /dev/fuse is open to all (as distributions have it) and the
interpreter can be reached by all; nothing of that is seen outside, and all of it ends with the
namespace's last process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from acpfs.ram.place import SMALL_PAGES
from tests.rig.namespaces import LET_GO

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(
        os.geteuid() != 0 or not os.access("/dev/fuse", os.W_OK), reason="needs root and /dev/fuse"
    ),
    pytest.mark.skipif(
        not (shutil.which("fusermount3") and shutil.which("setpriv")),
        reason="needs fusermount3 and setpriv",
    ),
]

REPOSITORY = Path(__file__).parents[2]
USER = 1000
AS_ROOT = f"""
set -eu
KEPT=
{LET_GO}
"""
AS_ROOT += """
mkdir "$BASE/dev"; mount -t tmpfs -o mode=755,dev none "$BASE/dev"
mknod "$BASE/dev/fuse" c 10 229; chmod 666 "$BASE/dev/fuse"; mount --bind "$BASE/dev/fuse" /dev/fuse
number=0
# directories that others may not enter, with what lies in them and is needed
for closed in $CLOSED; do
    for wanted in $WANTED; do
        case $wanted in "$closed"/*)
            number=$((number + 1)); mkdir "$BASE/$number"
            mount --bind "$wanted" "$BASE/$number" ;;
        esac
    done
    mount -t tmpfs -o mode=755 none "$closed"
    number=0
    for wanted in $WANTED; do
        case $wanted in "$closed"/*)
            number=$((number + 1)); mkdir -p "$wanted"
            mount --bind "$BASE/$number" "$wanted" ;;
        esac
    done
done
# the machine's has a directory that all tests of this user share
mount -t tmpfs -o "size=$SHARED_MEMORY,mode=1777" none /dev/shm
exec setpriv --reuid "$USER_ID" --regid "$USER_ID" --clear-groups bash -c "$AS_USER"
"""
AS_USER = """
set -eu
acpfs() { "$PYTHON" -c 'import sys; from acpfs.cli.main import main; sys.exit(main())' "$@"; }
ctl() { "$PYTHON" -c 'import sys; from acpfs.cli.ctl import main; sys.exit(main())' "$@"; }
acpfs doctor "$BASE/backing" --json >"$BASE/home/doctor"
acpfs mount "$BASE/backing" "$BASE/mnt" --ram 64M --transport "$TRANSPORT"
trap 'fusermount3 -u -z "$BASE/mnt" 2>/dev/null || true' EXIT
grep " $BASE/mnt " /proc/mounts >&2
echo hello >"$BASE/mnt/f"
dd if=/dev/urandom of="$BASE/mnt/g" bs=1M count=5 status=none
cp "$BASE/mnt/g" "$BASE/mnt/copy"
cmp "$BASE/mnt/g" "$BASE/mnt/copy"
ctl "$BASE/mnt" status --json
acpfs umount "$BASE/mnt" >&2
ls -A "/dev/shm/acpfs-$(id -u)" >"$BASE/home/left"
"""

FILLED = """
set -eu
acpfs() { "$PYTHON" -c 'import sys; from acpfs.cli.main import main; sys.exit(main())' "$@"; }
ctl() { "$PYTHON" -c 'import sys; from acpfs.cli.ctl import main; sys.exit(main())' "$@"; }
acpfs mount "$BASE/backing" "$BASE/mnt" --ram 64M >&2
trap 'fusermount3 -u -z "$BASE/mnt" 2>/dev/null || true' EXIT
ctl "$BASE/mnt" set bandwidth=64K >&2
head -c 4000000 /dev/urandom >"$BASE/mnt/before"
dd if=/dev/zero of=/dev/shm/others bs=64K status=none 2>&2 || true
refused=0
for number in $(seq 40); do
    head -c 400000 /dev/zero >"$BASE/mnt/small$number" 2>/dev/null || refused=$((refused + 1))
done
ctl "$BASE/mnt" status --json >"$BASE/home/full"
echo "$refused" >"$BASE/home/refused"
[ "$(stat -c %s "$BASE/mnt/before")" = 4000000 ]
rm /dev/shm/others
ctl "$BASE/mnt" set bandwidth=0 >&2
ctl "$BASE/mnt" flush --timeout 60 >&2
cp "$BASE/mnt/before" "$BASE/mnt/after"
cmp "$BASE/mnt/before" "$BASE/mnt/after"
ctl "$BASE/mnt" status --json
acpfs umount "$BASE/mnt" >&2
"""


SHUT_ABOVE = """
set -eu
acpfs() { "$PYTHON" -c 'import sys; from acpfs.cli.main import main; sys.exit(main())' "$@"; }
ctl() { "$PYTHON" -c 'import sys; from acpfs.cli.ctl import main; sys.exit(main())' "$@"; }
ask() { "$PYTHON" -c '
import errno, os
for place, name in ((3, "new"), (3, "cold"), (4, "cold"), (4, "missing")):
    try:
        with open(os.open(name, os.O_RDONLY, dir_fd=place)) as file:
            print(file.read().strip())
    except OSError as error:
        print(errno.errorcode[error.errno])
'; }
mkdir -p "$BASE/backing/a/b" "$BASE/backing/a/c"
echo cold >"$BASE/backing/a/b/cold"
echo cold >"$BASE/backing/a/c/cold"
acpfs mount "$BASE/backing" "$BASE/mnt" --ram 64M --transport "$TRANSPORT" >&2
trap 'fusermount3 -u -z "$BASE/mnt" 2>/dev/null || true' EXIT
echo new >"$BASE/mnt/a/b/new"
exec 3<"$BASE/mnt/a/b" 4<"$BASE/mnt/a/c"
chmod 0 "$BASE/mnt/a"
ctl "$BASE/mnt" flush --timeout 120 >&2
ask
chmod 755 "$BASE/mnt/a"
ctl "$BASE/mnt" flush --timeout 120 >&2
ask
exec 3<&- 4<&-
acpfs umount "$BASE/mnt" >&2
"""


READ_ONLY = """
set -eu
acpfs() { "$PYTHON" -c 'import sys; from acpfs.cli.main import main; sys.exit(main())' "$@"; }
ctl() { "$PYTHON" -c 'import sys; from acpfs.cli.ctl import main; sys.exit(main())' "$@"; }
acpfs mount "$BASE/backing" "$BASE/mnt" --ram 64M --transport "$TRANSPORT" >&2
trap 'fusermount3 -u -z "$BASE/mnt" 2>/dev/null || true' EXIT
mkdir "$BASE/mnt/d"
echo 1 >"$BASE/mnt/d/rewritten"
exec 3>"$BASE/mnt/d/open"
chmod 555 "$BASE/mnt/d"
mkdir -p "$BASE/mnt/above/below"
exec 4>"$BASE/mnt/above/below/open"
chmod 600 "$BASE/mnt/above"
ctl "$BASE/mnt" flush >&2
echo 4 >&4
exec 4>&-
echo 2 >"$BASE/mnt/d/rewritten"
echo 3 >&3
exec 3>&-
ctl "$BASE/mnt" flush >&2
cat "$BASE/backing/d/rewritten" "$BASE/backing/d/open"
stat -c %a "$BASE/backing/d" "$BASE/backing/above"
chmod 700 "$BASE/backing/above"
cat "$BASE/backing/above/below/open"
acpfs umount "$BASE/mnt" >&2
"""


OTHER_FILE_SYSTEM = """
set -eu
acpfs() { "$PYTHON" -c 'import sys; from acpfs.cli.main import main; sys.exit(main())' "$@"; }
ctl() { "$PYTHON" -c 'import sys; from acpfs.cli.ctl import main; sys.exit(main())' "$@"; }
acpfs mount "$BASE/backing" "$BASE/mnt" --ram 64M --transport "$TRANSPORT" >&2
trap 'fusermount3 -u -z "$BASE/mnt" 2>/dev/null || true' EXIT
mkdir "$BASE/mnt/above/below"
exec 3>"$BASE/mnt/above/below/first" 4>"$BASE/mnt/above/below/second"
chmod 600 "$BASE/mnt/above"
ctl "$BASE/mnt" flush >&2
echo 1 >&3
exec 3>&-
ctl "$BASE/mnt" flush --timeout 60 >&2
echo 2 >&4
exec 4>&-
ctl "$BASE/mnt" flush --timeout 60 >&2
stat -c %a "$BASE/backing/above"
acpfs umount "$BASE/mnt" >&2
chmod 700 "$BASE/backing/above"
cat "$BASE/backing/above/below/first" "$BASE/backing/above/below/second"
"""


@pytest.fixture
def base() -> Iterator[Path]:
    """A directory that others can reach."""
    path = Path(tempfile.mkdtemp(prefix="acpfs-user-"))
    path.chmod(0o755)
    for name in ("backing", "mnt", "run", "home"):
        (path / name).mkdir()
        os.chown(path / name, USER, USER)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def closed_above(path: Path) -> Path | None:
    """The topmost directory above a path that others may not enter."""
    return next((p for p in reversed(path.parents) if not p.stat().st_mode & 0o001), None)


def as_user(base: Path, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a mount namespace of its own."""
    wanted = {Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), REPOSITORY}
    closed = {above for path in wanted if (above := closed_above(path)) is not None}
    environment = {
        "PATH": os.environ["PATH"],
        "BASE": str(base),
        "CLOSED": " ".join(map(str, closed)),
        "WANTED": " ".join(map(str, wanted)),
        "USER_ID": str(USER),
        "AS_USER": script,
        "SHARED_MEMORY": "256M",
        "PYTHON": sys.executable,
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(base / "home"),
        "ACPFS_RUNTIME_DIR": str(base / "run"),
    } | environment
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "private", "bash", "-c", AS_ROOT],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.clause("S202", "S203")
def test_somebody_else_fills_the_shared_memory_that_the_ram_tier_lies_in(base: Path) -> None:
    done = as_user(base, FILLED, SHARED_MEMORY="96M")
    full = json.loads((base / "home/full").read_text())
    after = json.loads(done.stdout)
    assert int((base / "home/refused").read_text()) > 0
    assert not full["ram"]["own_tmpfs"]
    assert [status["worker"]["number"] for status in (full, after)] == [1, 1]
    assert (after["queue_length"], after["parked"], after["interrupted"]) == (0, 0, 0)
    assert (base / "backing/before").read_bytes() == (base / "backing/after").read_bytes()


@pytest.mark.parametrize("wish", ["auto", "native"])
def test_a_user_mounts_through_fusermount(base: Path, wish: str) -> None:
    done = as_user(base, AS_USER, TRANSPORT=wish)
    status = json.loads(done.stdout)
    assert (status["transport"], list(status["lanes"])) == ("native", ["direct"])
    assert (wish == "native") == (status["transport_reason"] == "asked for")
    assert "fuse.acpfs" in done.stderr
    doctor = {
        finding["subject"]: finding for finding in json.loads((base / "home/doctor").read_text())
    }
    assert "auto is native" in doctor["transport"]["text"]
    assert doctor["passthrough"]["verdict"] == "note"
    assert (base / "backing/f").read_text() == "hello\n"
    assert (base / "backing/g").read_bytes() == (base / "backing/copy").read_bytes()
    assert (base / "backing/g").stat().st_uid == USER
    assert SMALL_PAGES in " ".join(status["warnings"])
    assert (base / "home/left").read_text() == ""


@pytest.mark.clause("S461", "S486")
@pytest.mark.parametrize("wish", ["native", "libfuse"])
def test_what_a_user_may_write_in_a_read_only_directory_is_stored(base: Path, wish: str) -> None:
    done = as_user(base, READ_ONLY, TRANSPORT=wish)
    assert done.stdout.split() == ["2", "3", "555", "600", "4"]


@pytest.fixture
def above(base: Path) -> Iterator[Path]:
    """A file system of its own in the backing directory."""
    path = base / "backing/above"
    path.mkdir()
    options = f"mode=755,uid={USER},gid={USER}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", path], check=True)
    yield path
    subprocess.run(["umount", "-l", path], check=True)


@pytest.mark.usefixtures("above")
@pytest.mark.clause("S461", "S486")
@pytest.mark.parametrize("wish", ["native", "libfuse"])
def test_so_it_is_where_the_directory_that_may_not_be_entered_is_another_file_system(
    base: Path, wish: str
) -> None:
    """On which it lies cannot be asked: the rename says so, and where it was staged next lies below
    the same directory.
    """
    done = as_user(base, OTHER_FILE_SYSTEM, TRANSPORT=wish)
    assert done.stdout.split() == ["600", "1", "2"]


@pytest.mark.clause("S424")
@pytest.mark.parametrize("wish", ["native", "libfuse"])
def test_what_is_not_known_below_a_directory_that_is_shut_is_refused_and_not_forgotten(
    base: Path, wish: str
) -> None:
    done = as_user(base, SHUT_ABOVE, TRANSPORT=wish)
    assert done.stdout.split() == [
        *("new", "EACCES", "EACCES", "EACCES"),
        *("new", "cold", "cold", "ENOENT"),
    ]
