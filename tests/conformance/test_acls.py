"""POSIX ACLs: who may do what, what is inherited, what chmod makes of them; on a plain directory,
and on every transport.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rig.acls import ACCESS, DEFAULT, acl_of, set_acl
from tests.rig.processes import NOBODY, SOMEBODY, errno_as, in_child
from tests.rig.syscalls import link_descriptor
from tests.rig.targets import Target

clause = pytest.mark.clause
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become other users")

TEAM = 3000
GUEST = 2001
SHARED = f"u::rwx,u:{GUEST}:rwx,g::rwx,g:{TEAM}:rwx,m::rwx,o::"


@pytest.fixture(autouse=True)
def _with_acls(target: Target) -> None:
    if not target.can("acl"):
        pytest.skip("no ACLs there")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def reads(path: Path) -> Callable[[], object]:
    return path.read_bytes


@clause("S451")
def test_the_owning_group_gets_its_own_right_and_not_the_mask(d: Path) -> None:
    secret = d / "secret"
    secret.write_bytes(b"salaries")
    os.chown(secret, 0, TEAM)
    set_acl(secret, f"u::rw,u:{GUEST}:rw,g::,m::rw,o::")
    assert mode_of(secret) == 0o660
    assert errno_as(SOMEBODY, reads(secret), gid=TEAM) == errno.EACCES
    assert errno_as(NOBODY, reads(secret)) == errno.EACCES
    assert in_child(reads(secret), GUEST, NOBODY) == b"salaries"
    assert errno_as(GUEST, lambda: secret.write_bytes(b"more"), gid=NOBODY) == 0


@clause("S451")
def test_who_is_named_may_be_kept_out_of_what_others_may(d: Path) -> None:
    shown = d / "shown"
    shown.write_bytes(b"1")
    set_acl(shown, f"u::rw,u:{GUEST}:,g::r,m::r,o::r")
    assert errno_as(GUEST, reads(shown)) == errno.EACCES
    assert errno_as(SOMEBODY, reads(shown)) == 0


@clause("S451")
def test_directories_let_in_whom_their_acl_names(d: Path) -> None:
    project = d / "project"
    project.mkdir(0o700)
    set_acl(project, f"u::rwx,u:{GUEST}:rwx,g::,m::rwx,o::")
    assert errno_as(GUEST, lambda: (project / "f").write_bytes(b"x")) == 0
    assert errno_as(SOMEBODY, lambda: (project / "g").write_bytes(b"x")) == errno.EACCES
    assert (project / "f").stat().st_uid == GUEST
    set_acl(project, f"u::rwx,u:{GUEST}:r-x,g::,m::r-x,o::".replace("-", ""))
    assert errno_as(GUEST, lambda: (project / "h").write_bytes(b"x")) == errno.EACCES


@clause("S452")
@pytest.mark.parametrize("umask", [0, 0o077])
def test_files_inherit_the_default_acl(d: Path, target: Target, umask: int) -> None:
    """The umask does not count there; libfuse's kernel has applied it before anybody can say so
    (X5).
    """
    set_acl(d, SHARED, DEFAULT)

    def make() -> None:
        os.umask(umask)
        os.close(os.open(d / "file", os.O_CREAT | os.O_WRONLY, 0o666))
        os.mkdir(d / "dir", 0o777)
        os.mkfifo(d / "fifo", 0o640)
        os.symlink("x", d / "link")
        os.close(os.open(d / "dir" / "below", os.O_CREAT | os.O_WRONLY, 0o600))

    in_child(make, SOMEBODY, SOMEBODY)
    for name, bits in (("file", 0o666), ("dir", 0o777), ("fifo", 0o640), ("dir/below", 0o600)):
        given = bits & ~umask if target.name == "libfuse" else bits
        assert (name, oct(mode_of(d / name))) == (name, oct(given & 0o770))
        mask = "".join(x for x, bit in (("r", 4), ("w", 2), ("x", 1)) if given >> 3 & bit)
        owner = "".join(x for x, bit in (("r", 4), ("w", 2), ("x", 1)) if given >> 6 & bit)
        acl = f"u::{owner},u:{GUEST}:rwx,g::rwx,g:{TEAM}:rwx,m::{mask},o::"
        assert (name, acl_of(d / name)) == (name, acl)
        assert acl_of(d / name, DEFAULT) == (SHARED if name == "dir" else "")
    assert mode_of(d / "link") == 0o777


@clause("S452")
def test_a_default_acl_without_names_gives_a_mode_alone(d: Path, target: Target) -> None:
    set_acl(d, "u::rwx,g::rwx,o::", DEFAULT)

    def make() -> None:
        os.umask(0o022)
        os.close(os.open(d / "file", os.O_CREAT | os.O_WRONLY, 0o666))
        os.mkdir(d / "dir", 0o777)

    in_child(make, SOMEBODY, SOMEBODY)
    masked = 0o022 if target.name == "libfuse" else 0
    assert mode_of(d / "file") == 0o660 & ~masked
    assert mode_of(d / "dir") == 0o770 & ~masked
    assert acl_of(d / "file") == acl_of(d / "dir") == ""


@clause("S452")
def test_a_file_without_a_name_inherits_too(d: Path, target: Target) -> None:
    if not target.can("tmpfile"):
        pytest.skip("no O_TMPFILE there")
    set_acl(d, SHARED, DEFAULT)
    fd = os.open(d, os.O_TMPFILE | os.O_RDWR, 0o640)
    link_descriptor(fd, d / "named")
    os.close(fd)
    assert mode_of(d / "named") == 0o640
    assert acl_of(d / "named") == f"u::rw,u:{GUEST}:rwx,g::rwx,g:{TEAM}:rwx,m::r,o::"


@clause("S453")
def test_chmod_and_the_acl_keep_to_each_other(d: Path) -> None:
    f = d / "f"
    f.write_bytes(b"1")
    set_acl(f, f"u::rw,u:{GUEST}:rwx,g::r,m::rwx,o::r")
    assert mode_of(f) == 0o674
    f.chmod(0o4740)
    assert acl_of(f) == f"u::rwx,u:{GUEST}:rwx,g::r,m::r,o::"
    assert errno_as(GUEST, reads(f)) == 0
    assert errno_as(GUEST, lambda: f.write_bytes(b"2")) == errno.EACCES
    set_acl(f, "u::rw,g::r,o::r")
    assert (mode_of(f) & 0o777, acl_of(f)) == (0o644, "")
    assert ACCESS not in os.listxattr(f)


@clause("S453")
def test_an_acl_that_is_removed_leaves_the_mode(d: Path) -> None:
    set_acl(d, SHARED)
    set_acl(d, SHARED, DEFAULT)
    os.removexattr(d, DEFAULT)
    os.removexattr(d, ACCESS)
    assert (acl_of(d), acl_of(d, DEFAULT), mode_of(d)) == ("", "", 0o770)
    (d / "f").write_bytes(b"")
    assert acl_of(d / "f") == ""


@clause("S453")
def test_only_the_owner_sets_an_acl_and_set_gid_goes_where_he_is_not_in_the_group(
    d: Path, target: Target
) -> None:
    f = d / "f"
    f.write_bytes(b"1")
    os.chown(f, SOMEBODY, TEAM)
    f.chmod(0o2775)
    acl = f"u::rwx,u:{GUEST}:rwx,g::rwx,m::rwx,o::rx"
    assert errno_as(GUEST, lambda: set_acl(f, acl)) == errno.EPERM
    if target.name != "libfuse":  # which does not say who is in the group
        assert errno_as(SOMEBODY, lambda: set_acl(f, acl), groups=(TEAM,)) == 0
        assert mode_of(f) == 0o2775
    assert errno_as(SOMEBODY, lambda: set_acl(f, acl)) == 0
    assert mode_of(f) == 0o775
    for name in (DEFAULT, ACCESS):
        with pytest.raises(OSError) as caught:
            os.setxattr(f, name, b"no acl")
        assert caught.value.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.EACCES)


@clause("S453")
def test_an_acl_goes_with_its_file(d: Path, target: Target) -> None:
    """Renamed, linked, rewritten, replaced; and on the storage it is the same."""
    acl = f"u::rw,u:{GUEST}:rw,g::,m::rw,o::"
    f = d / "f"
    f.write_bytes(b"1")
    set_acl(f, acl)
    if target.mount is not None:
        target.mount.flush()
    os.link(f, d / "linked")
    os.rename(f, d / "g")
    (d / "g").write_bytes(b"rewritten")
    (d / "new").write_bytes(b"2")
    os.rename(d / "new", d / "linked")
    places = [d]
    if target.mount is not None:
        target.mount.flush()
        assert target.backing is not None
        places.append(target.backing / d.relative_to(target.root))
    for place in places:
        assert (place / "g").read_bytes() == b"rewritten"
        assert (acl_of(place / "g"), mode_of(place / "g")) == (acl, 0o660)
        assert acl_of(place / "linked") == ""


RIGHTS = ("", "r", "rw", "rwx", "rx", "x")
NAMES = ("a", "b", "sub", "sub/a", "sub/c")
WHO = ((SOMEBODY, SOMEBODY), (SOMEBODY, TEAM), (GUEST, NOBODY), (NOBODY, TEAM), (NOBODY, NOBODY))


def some_acl(rng: random.Random) -> str:
    r = [rng.choice(RIGHTS) for _ in range(6)]
    whole = f"u::{r[0]},u:{GUEST}:{r[1]},g::{r[2]},g:{TEAM}:{r[3]},m::{r[4]},o::{r[5]}"
    return rng.choice((whole, f"u::{r[0]},g::{r[2]},o::{r[5]}", f"u::rwx,g::{r[2]},m::rx,o::"))


def rewrite(path: Path) -> None:
    """Without waiting for a reader, where a fifo lies there."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o666)
    os.write(fd, b"x")
    os.close(fd)


def act(d: Path, rng: random.Random) -> str:
    """One random call; the errno's name where it is refused."""
    path = d / rng.choice(NAMES)
    other = d / rng.choice(NAMES)
    acl = some_acl(rng)
    bits = rng.randrange(0o1000)
    group = rng.choice((0, TEAM))
    calls: tuple[Callable[[], object], ...] = (
        lambda: rewrite(path),
        lambda: path.mkdir(bits | 0o700),
        lambda: os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, bits)),
        lambda: path.chmod(bits),
        lambda: set_acl(path, acl),
        lambda: set_acl(path, acl, DEFAULT),
        lambda: os.removexattr(path, rng.choice((ACCESS, DEFAULT))),
        lambda: os.chown(path, SOMEBODY, group),
        lambda: path.rename(other),
        lambda: path.unlink(),
        lambda: os.link(path, other),
        lambda: os.mkfifo(path, bits),
    )
    try:
        rng.choice(calls)()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "done"


def seen(d: Path) -> dict[str, tuple[str, str, str]]:
    found = {}
    for path in sorted(d.rglob("*")):
        name = str(path.relative_to(d))
        found[name] = (oct(path.lstat().st_mode), acl_of(path), acl_of(path, DEFAULT))
    return found


def allowed(d: Path) -> dict[str, str]:
    """What each user may do with each name, asked of the kernel."""
    found = {}
    paths = sorted(d.rglob("*"))
    for uid, gid in WHO:

        def look() -> list[str]:
            return [
                "".join(str(int(os.access(path, way))) for way in (os.R_OK, os.W_OK, os.X_OK))
                for path in paths
            ]

        answers = in_child(look, uid, gid)
        for path, answer in zip(paths, answers, strict=True):
            found[f"{path.relative_to(d)} {uid}:{gid}"] = answer
    return found


@clause("S451", "S452", "S453")
def test_random_calls_do_what_they_do_on_a_plain_directory(
    d: Path, target: Target, tmp_path: Path, seed: int
) -> None:
    for above in itertools.takewhile(lambda one: mode_of(one) & 0o001 == 0, tmp_path.parents):
        above.chmod(mode_of(above) | 0o011)  # pytest makes them for one user alone
    plain = tmp_path / "plain"
    plain.mkdir()
    plain.chmod(0o777)
    tmp_path.chmod(0o755)
    before = os.umask(0)  # libfuse's kernel applies it even where it does not count
    try:
        rngs = random.Random(seed), random.Random(seed)
        for step in range(150):
            outcomes = act(plain, rngs[0]), act(d, rngs[1])
            assert outcomes[0] == outcomes[1], step
            assert seen(d) == seen(plain), step
            if step % 25 == 24:
                assert allowed(d) == allowed(plain), step
    finally:
        os.umask(before)
    if target.mount is not None:
        target.mount.flush()
        assert target.backing is not None
        assert seen(target.backing / d.relative_to(target.root)) == seen(plain)
