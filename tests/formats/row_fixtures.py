"""For each line of docs/FORMATS.md: where the fixtures of a version have what it is about, and the
test that reads it there; or why there is none.

`test_page.py` holds that no line is missing, that the newest fixtures have such a file, and that
the test is one of those that the line names.
"""

from __future__ import annotations

from typing import NamedTuple


class Kept(NamedTuple):
    """A fixture of one line."""

    case: str
    """Directory below `fixtures/VERSION`, with the part of it that has a `files.json`."""
    name: str
    """Of a file in it, as `fnmatch` takes it; what follows `#` is an extended attribute of it."""
    test: str


LEFT = "formats/test_left::test_it_is_shown_as_it_was_and_drains"
RECORDS = "formats/test_left_records::"
MEMBER = "formats/test_members::test_what_an_older_node_says_is_read"
HELD = f"{RECORDS}test_what_is_held_is_adopted"
UNDERSTOOD = f"{RECORDS}test_what_lies_at_stored_files_is_understood"
GOES_ON = f"{RECORDS}test_a_mount_goes_on_where_one_ended_in_order"
RUN = f"{RECORDS}test_what_a_run_directory_says"
WORDS = f"{RECORDS}test_what_processes_left_is_understood"
GOES_BY = "it goes by, and outlives nobody: "

FIXTURES_OF: dict[str, Kept | str] = {
    "state": Kept("tier/tier", "state.sqlite", LEFT),
    "bytes of files": Kept("tier/tier", "data/[0-9]*", LEFT),
    "what it holds of other members (`exchange`, `copies`)": Kept(
        "held/tier", "data/held/left/*/about.json", HELD
    ),
    "whose tier it is": Kept("tier/tier", "meta.json", LEFT),
    "what a worker leaves to the next one of its session": Kept(
        "tier/tier", "session/facts.json", f"{RECORDS}test_a_session_says_what_was_open"
    ),
    "volume, and with it the names of all that is below `.acpfs`": Kept(
        "tier/backing", ".acpfs/volume", LEFT
    ),
    "member record": Kept("members", "records.json", MEMBER),
    "where a member is reached, and its key": Kept("held/backing", ".acpfs/nodes/left", HELD),
    "names that are pending at a member": Kept("tier/backing", ".acpfs/nodes/left", LEFT),
    "manifest": Kept("stored/backing", ".acpfs/manifest/left.xxh128", UNDERSTOOD),
    "staging files, areas": Kept("tier/backing", ".acpfs/staging/left/*", LEFT),
    "claim of a log": Kept("stored/backing", ".acpfs/claims/left+1", UNDERSTOOD),
    "what late calls do on this storage": "a help only: `acpfs doctor` finds it out anew",
    "mark of a mirror": Kept("mirror/backing", ".acpfs/mirrors/left", LEFT),
    "journal on the storage, of copies whose holder is out of reach": Kept(
        "journal/backing", ".acpfs/journals/left+*.log.0", HELD
    ),
    "xattr `user.acpfs.xxh3`": Kept("stored/backing", "run/*#user.acpfs.xxh3", UNDERSTOOD),
    "xattr `user.acpfs.fsync`": Kept("stored/backing", "run#user.acpfs.fsync", GOES_ON),
    "xattr `user.acpfs.needs`": "it lies nowhere: it is in the mount only",
    "copies of versions": Kept("mirror/spill", "[0-9]*-*", LEFT),
    "mirror's journal": Kept("mirror/spill", "mirror-*.log", LEFT),
    "node id for after a reboot": "one line of text: the id, which no version writes otherwise",
    "which mounts there are": Kept("stored/run", "mounts/*.json", RUN),
    "bypassed mounts": Kept("words", "beneath/*.json", WORDS),
    "node id": "one line of text: the id, which no version writes otherwise",
    "key of a member": "a standard form (PEM), and no key is kept in a repository",
    "learnt sizes, history, expected volume": Kept("stored/run", "remembered/history/*.json", RUN),
    "log of the daemon": "acpfs reads it never",
    "list of `acpfs salvage`": "acpfs reads it never",
    "what one supervisor leaves to the next": Kept("words", "supervisor.json", WORDS),
    "messages of supervisor, template, worker, keeper, hold process": (
        f"{GOES_BY}take-overs between two versions say them (`test_candidate.py`)"
    ),
    "questions between a worker and its exchange process": (
        f"{GOES_BY}both ends are of one version"
    ),
    "settings that go on": Kept("words", "supervisor.json", WORDS),
    "control socket": f"{GOES_BY}`contract.json` has its verbs and arguments",
    "JSON of each verb": f"{GOES_BY}`contract.json` has its fields",
    "metrics": f"{GOES_BY}`contract.json` has their names",
    "configuration": "people write it: `contract.json` has the names of settings",
    "deployment": "other tools read it",
    "exit codes": f"{GOES_BY}`contract.json` has them",
    "questions and ranges (`exchange`)": f"{GOES_BY}members of two versions say so (S563)",
    "copies (`copies`)": f"{GOES_BY}members of two versions say so (S563)",
    "manifest of a gasp": Kept("words", "gasp/gasp.json", WORDS),
    "messages of ranks, coordinators, launchers": Kept("words", "message.json", WORDS),
    "what a coordinator leaves": Kept("words", ".acpfs-job/*/coordinator-0", WORDS),
    "faults, drills": Kept("words", ".acpfs-job/*/faults.jsonl", WORDS),
    "what a rank that ends leaves": (
        "a process's memory, and nothing of it on a disk; another version's is left alone"
    ),
    "tensors between ranks, spare processes, templates": (
        f"{GOES_BY}all ranks of a job have one acpfs"
    ),
    "checkpoints": "the framework's own: `tests/frameworks` loads them without acpfs",
    "MindIO's container": "never written: the tests have bytes as MindIO's documents show them",
}
