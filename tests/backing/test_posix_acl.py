"""ACLs as bytes: what chmod and inheritance make of them, and a mode that gives nobody more than
one does.
"""

from __future__ import annotations

import errno
import itertools
import random

import pytest

from acpfs.backing import posix_acl
from acpfs.backing.posix_acl import GROUP, GROUP_OBJ, MASK, OTHER, USER, USER_OBJ, Entry
from tests.rig.acls import encoded, shown

clause = pytest.mark.clause
OWNER = 100
OWNING_GROUP = 200
USERS = (OWNER, 101, 102)
GROUPS = (OWNING_GROUP, 201, 202)


def may(entries: list[Entry], uid: int, gids: frozenset[int]) -> list[int]:
    """The rights that somebody has, of which the kernel takes one that suffices:
    `posix_acl_permission`.
    """
    mask = next((entry.may for entry in entries if entry.tag == MASK), 7)
    own = {entry.tag: entry.may for entry in entries}
    if uid == OWNER:
        return [own[USER_OBJ]]
    for entry in entries:
        if entry.tag == USER and entry.id == uid:
            return [entry.may & mask]
    groups = [entry.may & mask for entry in entries if entry.tag == GROUP and entry.id in gids]
    if OWNING_GROUP in gids:
        groups.append(own[GROUP_OBJ] & mask)
    return groups or [own[OTHER]]


def some_entries(rng: random.Random) -> list[Entry]:
    entries = [Entry(tag, rng.randrange(8)) for tag in (USER_OBJ, GROUP_OBJ, OTHER)]
    entries += [Entry(USER, rng.randrange(8), uid) for uid in USERS if rng.random() < 0.4]
    entries += [Entry(GROUP, rng.randrange(8), gid) for gid in GROUPS if rng.random() < 0.4]
    if len(entries) > 3 or rng.random() < 0.3:
        entries.append(Entry(MASK, rng.randrange(8)))
    return sorted(entries, key=lambda entry: (entry.tag, entry.id))


@clause("S454")
def test_a_narrowed_mode_gives_nobody_more_than_the_acl(seed: int) -> None:
    rng = random.Random(seed)
    everybody = [
        (uid, frozenset(gids))
        for uid in (*USERS, 103)
        for count in range(3)
        for gids in itertools.combinations((*GROUPS, 203), count)
    ]
    for _round in range(300):
        entries = some_entries(rng)
        value = posix_acl.encode(entries)
        mode = posix_acl.narrow(value, 0o4000 | posix_acl.mode_bits(value))
        assert mode & ~0o777 == 0o4000
        rest = posix_acl.decode(posix_acl.of_mode(mode))
        for uid, gids in everybody:
            for wanted in (1, 2, 4):
                granted = any(one & wanted for one in may(rest, uid, gids))
                assert not granted or any(one & wanted for one in may(entries, uid, gids))


@clause("S454")
def test_an_acl_without_names_is_narrowed_to_what_it_says() -> None:
    assert posix_acl.narrow(encoded("u::rw,g::r,m::rw,o::r"), 0o664) == 0o644


@clause("S453")
def test_chmod_changes_the_mask_and_no_name() -> None:
    value = encoded("u::rwx,u:7:rwx,g::rx,m::rwx,o::r")
    assert shown(posix_acl.after_chmod(value, 0o640)) == "u::rw,u:7:rwx,g::rx,m::r,o::"
    assert posix_acl.mode_bits(posix_acl.after_chmod(value, 0o640)) == 0o640
    plain = posix_acl.of_mode(0o754)
    assert shown(posix_acl.after_chmod(plain, 0o421)) == "u::r,g::w,o::x"
    assert (posix_acl.says_more(value), posix_acl.says_more(plain)) == (True, False)


@clause("S452")
def test_what_is_inherited_gives_no_more_than_was_asked_for() -> None:
    default = encoded("u::rwx,u:7:rwx,g::rx,m::rwx,o::r")
    mode, access = posix_acl.inherited(default, 0o100606)
    assert (oct(mode), access and shown(access)) == (oct(0o100604), "u::rw,u:7:rwx,g::rx,m::,o::r")
    assert posix_acl.inherited(encoded("u::rw,g::r,o::"), 0o100777) == (0o100640, None)


@pytest.mark.parametrize("value", [b"", b"\2\0\0", b"\1\0\0\0", b"\2\0\0\0abc"])
def test_what_is_no_acl_is_refused(value: bytes) -> None:
    with pytest.raises(OSError) as caught:
        posix_acl.decode(value)
    assert caught.value.errno == errno.EINVAL
