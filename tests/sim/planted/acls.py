"""Known defects of POSIX ACLs."""

from __future__ import annotations

from tests.sim.planted.bug import Bug

ACL_BUGS = [
    Bug(
        "acl-not-handed-on",
        "what is made in a directory with a default ACL gets none",
        "filesystem/names.py",
        "        node.xattrs.update(rights.acls)\n",
        "",
    ),
    Bug(
        "acl-lost-with-its-content",
        "a file that is written anew has no ACL any more",
        "writeback/commits/commit.py",
        "                        if name not in op.meta.xattrs\n",
        "                        if name not in op.meta.xattrs | dict.fromkeys(posix_acl.NAMES)\n",
    ),
    Bug(
        "acl-of-a-later-default",
        "a directory keeps what the storage gave it by a default ACL that was set later",
        "writeback/commits/commit.py",
        "        meta.xattrs.update(dict.fromkeys(inherited))\n",
        "",
        unreached=(
            "ACLs come in their order, and only what others set on the storage would be there too "
            "early: none of 200 histories; tests/filesystem/test_acls.py has it"
        ),
    ),
    Bug(
        "acl-without-its-mode",
        "an ACL that is logged with an earlier mode has the mask of that",
        "filesystem/attribute_calls.py",
        "            Metadata(permissions=stat.S_IMODE(node.mode), xattrs={name: value}),\n",
        "            Metadata(xattrs={name: value}),\n",
    ),
]
