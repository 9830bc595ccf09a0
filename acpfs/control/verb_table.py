"""The table of control verbs: one entry each, from which permission, place, command, help and the
document's lines follow.

`acpfs.control.server` asks it who may ask and for how long, `acpfs.cli.ctl` which commands there
are, `tools/write_tables.py` writes its texts into OPERATIONS. `tests/control/test_verb_table.py`
checks that each entry has a handler, and each handler an entry. Data only: commands read it before
they have imported anything.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verb:
    """One verb of the control socket. Without `usage` it has no command of its own.

    `help`: its line in `acpfs-ctl --help`, for verbs that are a module of `acpfs.cli.verbs`.
    `usage`, `does`: its row in OPERATIONS, "Commands". `answer`: its row in docs/reference/json.md.
    `lasting`: it may wait for something, perhaps for ever, and must not keep `status` and `unmount`
    out. `takes`: its arguments; another one that says something is a newer command's, and refused.
    `owner_only`: it gives up data, changes what others share, or ends the mount; members of the
    control group may do all but these.
    """

    takes: tuple[str, ...] = ()
    help: str = ""
    usage: tuple[str, ...] = ()
    does: str = ""
    answer: str = ""
    has_handler: bool = True
    """False: a command only, which asks other verbs."""
    lasting: bool = False
    owner_only: bool = False


VERBS: dict[str, Verb] = {
    "status": Verb(
        help=(
            "Show what is not safe yet and why, the RAM tier, the queue, and the health of the "
            "storage."
        ),
        usage=("status [--watch]",),
        does=(
            "first what is not yet safe and why; then RAM tier, queue, health of the backing "
            "directory, counters"
        ),
    ),
    "ready": Verb(
        help="Exit with 0 if the mount serves requests; for probes.",
        usage=("ready [--here]",),
        does=(
            "for probes: exit 0 where a worker answers and the mount serves, also while the "
            "backing directory hangs; 1 where it is "
            "bypassed or drains to end, 3 where nobody answers; `--here`: and 1 where its "
            "supervisor is in another container"
        ),
        answer="`ready`: whether it serves; `state` as in `status`",
    ),
    "flush": Verb(
        takes=("paths", "timeout_s"),
        help="Wait until everything that is complete now is persisted.",
        usage=("flush [PATH…] [--timeout S]",),
        does=(
            "return when all that was complete at the call is persisted; with PATHs, exit code 4 "
            "if something below them is being "
            "written, and 1 if it is interrupted"
        ),
        answer="`operations`, `bytes`: what there was to wait for; `guarded` as in `status`",
        lasting=True,
    ),
    "wait": Verb(
        takes=("paths", "timeout_s", "verified", "copied", "count"),
        help="Wait until these paths are persisted, or verified.",
        usage=("wait PATH… [--persisted|--verified|--copied] [--count N] [--timeout S]",),
        does=(
            "return when these paths, as they are now, are persisted: a file that is being "
            "written is waited for, and one that is "
            "interrupted is an error; `--verified`: also read back and equal by checksum; "
            "`--copied`: when another node has them, too, or they are persisted; "
            "`--count`: when at least N files below PATHs are persisted and none is left there "
            "that is not"
        ),
        answer=(
            "`operations`, `bytes`: what there was to wait for; `--verified`: also `verified`, "
            "number of files; `--copied`: `state`, copied or persisted"
        ),
        lasting=True,
    ),
    "checkpoints": Verb(
        takes=("paths",),
        help="List checkpoints: when each was saved and persisted, and where it loads from.",
        usage=("checkpoints [PATH]",),
        does=(
            "each checkpoint at and below PATH that was written or looked at through the mount: "
            "step, files, size, state, time to "
            "save and until persisted, where it loads from and in about how long"
        ),
        answer=(
            "list of `path`, `save_dir`, `step`, `epoch`, `state` (`writing`, `interrupted`: "
            "some of it lost its writer (S181), "
            "`complete`: closed and nothing persisted, "
            "`persisting`, `persisted`, `verified`, `evicted`: persisted and nothing in RAM, "
            "`damaged`: `verify` found that a file "
            "is not what was stored), `files`, `persisted_files`, `bytes`, "
            "`ram_bytes`, `began_at` (first create), `closed_at` (last close, or rename into "
            "place), `persisted_at`, "
            "`verified_at`, `save_s` (first create to last close), `persist_s` (first create "
            "until persisted), `loads_from` "
            "(`ram`, `spill`, `backing`, `mixed`), `estimated_load_s` (by the rates at which RAM "
            "and backing directory were read "
            "so far; `null` where one of them never was)"
        ),
    ),
    "history": Verb(
        help="Show what happened to the mount: checkpoints, takeovers, trouble.",
        usage=("history [--kind KIND]… [--csv|--html FILE]",),
        does=(
            "what happened to the mount, also to earlier ones of the same backing directory: "
            "checkpoints that were persisted with "
            "size and times, loads and where they came from, workers that took over, trouble "
            "with storage and members "
            "([below](#history-and-advice))"
        ),
        answer=(
            "list of `at`, `kind` (`checkpoint`, `load`, `mount`, `takeover`, `storage`, "
            "`refused`, `interrupted`, `withheld`, `conflict`, "
            "`member`, `bypass`), `text`; of checkpoints and loads also `path`, `step`, `files`, "
            "`bytes`, `began_at`, of "
            "checkpoints `save_s`, `persist_s` (both from the first create), `verified`, of "
            "loads `load_s` (first open to last close), "
            "`loaded_from` (`ram`, `spill`, `backing`, `mixed`), else null"
        ),
    ),
    "advise": Verb(
        help="Say how often to save, from what the mount has measured.",
        usage=("advise --mtbf TIME [--gpus N] [--plot FILE] [options]",),
        does=(
            "the interval between saves that wastes least, by the saves that this mount has "
            "measured, what it is worth against "
            "today's, and whether storage and RAM keep up ([below](#history-and-advice))"
        ),
        answer=(
            "`measured` (medians: `saves`, `save_s`, `drain_s`, `interval_s`, `bytes`), `job` "
            "(what the formula was given), "
            "`advice`: `interval_s` (null: saving never pays), `waste`, `today_s`, "
            "`today_waste`, `gpu_hours_a_day`, "
            "`storage_keeps_up`, `interval_min_s` (from there on it does), `ram_wanted_bytes`, "
            "`ram_budget_bytes`"
        ),
        has_handler=False,
    ),
    "top": Verb(
        help=(
            "Show one mount, or all of this machine, on a screen that is kept up to date, with "
            "keys."
        ),
        usage=("top [--interval SECONDS]",),
        does=(
            "a screen with RAM, drain, queue, who waits, checkpoints and members, of one mount "
            "or of all on this machine, "
            "and keys that act ([below](#a-screen))"
        ),
        has_handler=False,
    ),
    "ls": Verb(
        takes=("paths",),
        help="List the files in the RAM tier and in the queue, with their state.",
        usage=("ls [PATH]",),
        does=(
            "state, size, age, place, lane, checksum, error and who is in the middle of it, of "
            "each file in the RAM tier or the queue"
        ),
        answer=(
            "list of `path`, `size`, `state` (`writing`, `complete`, `streaming`, `staged`, "
            "`committed`, `clean`, `parked`, "
            "`interrupted`), `lane`, `tier` (`ram`, `spill`, `backing`, `ram+backing`), "
            "`checksum`, `error`, `age_s`, "
            "`writers` (of a file that somebody is in the middle of, as in `status`)"
        ),
    ),
    "verify": Verb(
        takes=("paths",),
        help="Read files back from the backing directory and compare them with their checksums.",
        usage=("verify [PATH…]",),
        does=(
            "read the backing directory and compare with the recorded checksums; without PATH "
            "everything that is recorded"
        ),
        answer=(
            "list of `path`, `status` (`ok`, `mismatch`, `missing`, `unknown`: never written "
            "through a mount, `unreadable`), "
            "`size`, `expected`, `found`, `error`"
        ),
        lasting=True,
    ),
    "verify_ram": Verb(
        takes=("paths",),
        usage=("verify --ram [PATH…]",),
        does=(
            "compare what RAM has of files with the recorded checksums; a bad copy of what is "
            "persisted leaves RAM (`repaired`), "
            "bytes that are nowhere else are named (`damaged`, exit code 1)"
        ),
        answer=(
            "list of the same, of files that are whole in RAM: `status` `ok`, `unknown` (no "
            "checksum to compare with), `repaired`, "
            "`damaged`; `error` says what follows from it"
        ),
        lasting=True,
    ),
    "doctor": Verb(
        help="Check that the mount's own state is consistent.",
        usage=("doctor",),
        does=(
            "look whether what the mount knows of files, names and their bytes in RAM agrees; "
            "exits 1 and names what does not. It "
            "changes nothing and can be asked at any time"
        ),
        answer="list of `path`, `fault` (in words); empty when all is as it must be",
        lasting=True,
    ),
    "retry": Verb(
        takes=("paths",),
        help="Try failed operations again now.",
        usage=("retry PATH|--all",),
        does=(
            "try again, now, what failed or was refused at and below PATH (`--all`: in the whole "
            "mount); "
            "store files whose writer was lost as they are; exits 1 where there is nothing"
        ),
        answer="`operations`: how many",
    ),
    "reload": Verb(
        help="Restart the worker with the installed code, without unmounting.",
        usage=("reload [--timeout SECONDS]",),
        does=(
            "restart the worker with the installed code, without unmounting "
            "([below](#when-a-worker-dies))"
        ),
    ),
    "bypass": Verb(
        takes=("reason",),
        help="Uncover the backing directory: new opens go to it directly.",
        usage=("bypass [--reason TEXT]",),
        does=(
            "take the mount away from over the backing directory: new opens are native under the "
            "same path "
            "([below](#when-acpfs-cannot-go-on))"
        ),
        owner_only=True,
    ),
    "repair": Verb(
        takes=("paths", "timeout_s"),
        help="Write bad files again from RAM, if RAM still has them.",
        usage=("repair PATH… [--timeout S]",),
        does=(
            "verify, and write what is not as recorded once more from RAM where RAM still has "
            "the recorded content; says why where "
            "it cannot, and exits 1"
        ),
        answer=(
            "list as of `verify`, of what was bad: `status` `repaired`, or as it still is with "
            "`error` saying why"
        ),
        lasting=True,
    ),
    "preload": Verb(
        takes=("paths", "latest", "wait"),
        help="Load files or checkpoints into RAM before they are read.",
        usage=(
            "preload PATH… [--wait]",
            "preload --latest",
        ),
        does=(
            "bring files, or the newest checkpoint, to RAM before they are read "
            "([below](#what-comes-to-ram))"
        ),
        answer=(
            "with `--wait` a list of `path`, `size`, `status` (`verified`, `unknown`: no "
            "checksum to compare with, `in RAM`: it "
            "was, `no room`, `changed`, `mismatch`, `differs`: from the manifest, which others "
            "may have made out of date, `failed: "
            "…`)"
        ),
        lasting=True,
    ),
    "pin": Verb(
        takes=("paths",),
        help="Keep files at and below these paths in RAM.",
        usage=("pin PATH…",),
        does=(
            "keep what lies at and below PATHs in RAM, now and later ([below](#what-stays-in-ram))"
        ),
        answer="`pinned_bytes`: what pins keep in RAM now",
    ),
    "unpin": Verb(
        takes=("paths",),
        help="Remove pins.",
        usage=("unpin PATH…",),
        does="take off the pins at and below PATHs; exits 1 where there are none",
        answer="`pins`: how many were taken off",
    ),
    "urgent": Verb(
        takes=("paths", "off", "for_s"),
        help="Let files use the RAM that is kept in reserve, for at most an hour.",
        usage=("urgent PATH [--for 1h] [--off]",),
        does=(
            "let the file PATH, or those below the directory PATH, take the part of RAM that "
            "`reserve` keeps for them, for an hour "
            "at most; for its owner and root ([below](#files-that-must-not-wait))"
        ),
        answer="`changed`: whether it is urgent now, or with `--off` was until now",
    ),
    "evict": Verb(
        takes=("paths",),
        help="Evict clean files from RAM now.",
        usage=("evict PATH…",),
        does="let clean contents at and below PATHs leave RAM now, and say what stayed and why",
        answer="`files`, `bytes`: what left; `items`: what stayed, with `path`, `reason`, `size`",
    ),
    "release": Verb(
        takes=("paths",),
        help="Carry out deletions of checkpoints that the guard holds back.",
        usage=(
            "release PATH…",
            "release --all",
        ),
        does=(
            "carry out deletions of checkpoints that are held back "
            "([below](#what-stays-on-the-backing-directory)), at and below "
            "PATHs or all; exits 1 where there are none"
        ),
        answer="`checkpoints`: of how many the deletion is carried out now",
    ),
    "discard": Verb(
        takes=("paths",),
        help="Drop operations that the backing directory refused for good, with their data.",
        usage=("discard PATH",),
        does=(
            "give up what was refused for good, and files whose writer was lost, at and below "
            "PATH: with their data; exits 1 where "
            "there is nothing, or where somebody has such a file open"
        ),
        answer=(
            "`operations`: how many; `open`: paths of interrupted files that somebody has open, "
            "which stay"
        ),
        owner_only=True,
    ),
    "nodes": Verb(
        help=(
            "List the mounts that share the backing directory; `nodes forget NODE` goes on "
            "without one."
        ),
        usage=("nodes",),
        does=(
            "all members, that is all mounts of the backing directory: who lives, how far each "
            "has drained, how their clocks "
            "differ ([below](#many-machines))"
        ),
        answer=(
            "list of `node`, `state` (`this`, `live`, `missing`, `away`: ended with something in "
            "its RAM tier, `left`: unmounted "
            "in order, `gone`: its machine was started again, `forgotten`, `unreadable`), "
            "`host`, `mount`, `version`, `silent_s`, "
            "`lag_s` (its watermark behind its clock), `operations`, `dirty_bytes`, `withheld`, "
            "`clock_ahead_s` (two bounds of "
            "what its clock is ahead of this member's; null: not measured), `clock_bound_s`, "
            "`drift_s`, `lost` (between which "
            "times it may have lost what it closed), `errors`"
        ),
    ),
    "wait_nodes": Verb(
        takes=("timeout_s",),
        usage=("nodes wait [--timeout S]",),
        does=(
            "return when what other live members had closed before is persisted and can be read "
            "here; 4: not in time, and which "
            "members still drain"
        ),
        answer="`nodes`: who still drains; empty when it is done",
        lasting=True,
    ),
    "forget_node": Verb(
        takes=("node",),
        usage=("nodes forget NODE",),
        does=(
            "go on without a member that is missing, or that a pointer names and nobody knows: "
            "what it had not persisted is given "
            "up; 5 if it lives"
        ),
        owner_only=True,
    ),
    "adopt": Verb(
        takes=("node",),
        help="Drain what this mount holds of a node that is lost for good.",
        usage=("adopt NODE",),
        does=(
            "take nothing more of a node that is lost, and say where its copy lies; 5 where it "
            "lives, or where nothing is held of it that counts"
        ),
        answer=(
            "`node`, `by` (this one), `backing`, `runtime_dir`, `spill` (the copy), `volume`, "
            "`settings` (of the order, as they are here)"
        ),
        owner_only=True,
    ),
    "adopted": Verb(
        takes=("node",),
        usage=("adopt NODE",),
        does="drop what is held of a node whose log was adopted and drained; 5 where it is not",
        answer="`node`",
        owner_only=True,
    ),
    "config": Verb(
        help="Show the settings in force.",
        usage=("config",),
        does="effective settings",
        answer="setting → value",
    ),
    "set": Verb(
        takes=("key", "value"),
        help="Change settings until the mount ends; `set --help` lists them.",
        usage=("set KEY=VALUE…",),
        does=(
            "change `bandwidth`, `streams`, `log_level`, `ram`, `when_full`, `keep_checkpoints`, "
            "`spill_budget`, `wait_for_peers`, "
            "`reserve`, `ram_per_user` until the mount ends"
        ),
        answer="changed setting → new value",
        owner_only=True,
    ),
    "metrics": Verb(
        help="Print Prometheus metrics.",
        usage=("metrics",),
        does="Prometheus metrics as text",
    ),
    "watch": Verb(
        takes=("paths", "count", "settle_s", "after"),
        answer=(
            "(socket only, without end) an event `checkpoint` for each that becomes safe: "
            "`checkpoint` as above, `files` with "
            "`path`, `size`, `persisted`, `checksum`; arguments `count`, `settle_s`, `after`"
        ),
        lasting=True,
    ),
    "unmount": Verb(
        takes=("leave", "timeout_s"),
        owner_only=True,
    ),
}
