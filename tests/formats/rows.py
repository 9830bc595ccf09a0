"""For each line of docs/FORMATS.md: the tests that an older form of it is read, and that of a newer
one what is not known is left out, or refused with a sentence.

`test_page.py` holds that no line is missing, and that the tests are there.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """Tests of one line, as `directory/module::function` below `tests`."""

    older: tuple[str, ...] = ()
    """An older writer, or none: what it left or said is read."""
    newer: tuple[str, ...] = ()
    """A newer writer."""
    why: str = ""
    """Where there is no older or newer one: why not."""


LEFT = "formats/test_left::test_it_is_shown_as_it_was_and_drains"
JOURNAL_LEFT = "formats/test_left::test_a_journal_gives_each_file_the_time_that_it_had"
MEMBER = "formats/test_members::test_what_an_older_node_says_is_read"
TODAYS_MEMBER = "formats/test_members::test_an_older_node_finds_in_todays_record_what_it_knows"
NEWER_STATE = "formats/test_newer::test_a_state_is_not_opened"
NEWER_RECORD = "formats/test_newer::test_a_members_record_is_told_of_and_counts_as_none"
NEWER_JOURNAL = "writeback/test_journals::test_a_newer_format_is_refused"
CONTRACT = "formats/test_contract::test_nothing_that_was_there_is_gone"
VERB = "control/test_server::test_a_malformed_request_is_answered_and_hurts_nobody"
BOTH_VERSIONS = (
    "formats/test_held::test_a_save_goes_on_over_both_versions_and_what_one_does_not_know_is_named"
)

ROWS = {
    "state": Row(
        older=(
            LEFT,
            "filesystem/test_older_state::test_the_state_of_an_older_version_says_what_it_said",
            "filesystem/test_older_state::test_salvage_reads_a_tier_of_an_older_version",
        ),
        newer=(
            NEWER_STATE,
            "formats/test_newer::test_a_tier_is_not_salvaged_by_half",
        ),
    ),
    "bytes of files": Row(
        older=(LEFT,),
        newer=(NEWER_STATE,),
    ),
    "what it holds of other members (`exchange`, `copies`)": Row(
        older=(
            "formats/test_left_records::test_what_is_held_is_adopted",
            "formats/test_forms::test_what_is_held_of_another_member_stays_whatever_else_is_said_of_it",
        ),
        newer=(
            "formats/test_held::test_the_state_says_so_from_when_the_worker_serves_until_it_is_over",
            "formats/test_held::test_an_acpfs_without_copies_is_refused_and_takes_it_when_nothing_is_held",
        ),
    ),
    "whose tier it is": Row(
        older=(LEFT,),
        newer=("formats/test_forms::test_whose_tier_it_is_may_be_said_with_more_words",),
    ),
    "what a worker leaves to the next one of its session": Row(
        older=(
            "formats/test_left_records::test_a_session_says_what_was_open",
            "supervisor/test_older_version::test_files_go_on_over_a_change_of_the_state_and_the_older_code_is_refused_afterwards",
            "formats/test_handle_records::test_who_takes_all_of_the_word_for_flags_reads_the_same_ones",
        ),
        newer=("formats/test_newer::test_a_session_is_not_taken_over",),
    ),
    "volume, and with it the names of all that is below `.acpfs`": Row(
        older=(LEFT,),
        newer=("formats/test_newer::test_a_volume_is_not_mounted",),
    ),
    "member record": Row(
        older=(
            MEMBER,
            TODAYS_MEMBER,
        ),
        newer=(NEWER_RECORD,),
    ),
    "where a member is reached, and its key": Row(
        older=(
            "formats/test_left_records::test_what_is_held_is_adopted",
            MEMBER,
        ),
        newer=(NEWER_RECORD,),
    ),
    "names that are pending at a member": Row(
        older=(
            "formats/test_left::test_it_is_shown_as_it_was_and_drains",
            "backing/test_name_filter::test_a_record_of_an_older_acpfs_says_nothing",
        ),
        newer=(
            "backing/test_name_filter::test_what_a_newer_acpfs_or_anybody_wrote_there_says_nothing",
        ),
    ),
    "manifest": Row(
        older=(
            "formats/test_left_records::test_what_lies_at_stored_files_is_understood",
            LEFT,
        ),
        newer=("formats/test_forms::test_lines_of_a_manifest_that_have_another_form_are_left_out",),
    ),
    "staging files, areas": Row(
        older=(
            LEFT,
            "backing/test_terms::test_what_is_still_there_comes_with_the_term",
        ),
        newer=(
            "backing/test_terms::test_names_of_terms",
            "formats/test_newer::test_a_volume_is_not_mounted",
        ),
    ),
    "claim of a log": Row(
        older=(
            "formats/test_left_records::test_what_lies_at_stored_files_is_understood",
            "formats/test_forms::test_a_claim_is_whose_it_says_and_else_nobodys",
        ),
        newer=("formats/test_forms::test_a_claim_is_whose_it_says_and_else_nobodys",),
    ),
    "what late calls do on this storage": Row(
        older=("exchange/test_closed_sessions::test_a_note_is_read_or_nothing_is_known",),
        newer=("exchange/test_closed_sessions::test_a_note_is_read_or_nothing_is_known",),
    ),
    "mark of a mirror": Row(
        older=(
            LEFT,
            "formats/test_forms::test_a_mark_says_which_journal_counts_and_may_say_more",
        ),
        newer=("formats/test_forms::test_a_mark_that_is_not_understood_refuses_the_mount",),
    ),
    "journal on the storage, of copies whose holder is out of reach": Row(
        older=(
            "formats/test_left_records::test_what_is_held_is_adopted",
            "writeback/test_journals::test_a_journal_of_today_is_read_by_later_versions",
        ),
        newer=(NEWER_JOURNAL,),
    ),
    "xattr `user.acpfs.xxh3`": Row(
        older=(
            "formats/test_left_records::test_what_lies_at_stored_files_is_understood",
            "formats/test_forms::test_a_note_of_another_form_is_none",
        ),
        newer=("formats/test_forms::test_a_note_of_another_form_is_none",),
    ),
    "xattr `user.acpfs.fsync`": Row(
        older=(
            "formats/test_left_records::test_a_mount_goes_on_where_one_ended_in_order",
            "filesystem/test_moves::test_the_fsync_mode_of_a_directory_that_moves_is_known",
        ),
        newer=("filesystem/test_durable_names::test_a_mode_that_nobody_here_knows_is_none",),
    ),
    "xattr `user.acpfs.needs`": Row(why="it lies nowhere: it is in the mount only"),
    "copies of versions": Row(
        older=(
            LEFT,
            JOURNAL_LEFT,
        ),
        newer=(NEWER_STATE,),
    ),
    "mirror's journal": Row(
        older=(
            LEFT,
            JOURNAL_LEFT,
            "filesystem/test_older_state::test_a_journal_of_an_older_version_becomes_a_state",
            "writeback/test_journals::test_a_journal_of_today_is_read_by_later_versions",
        ),
        newer=(
            NEWER_JOURNAL,
            "formats/test_newer::test_a_mirrors_journal_does_not_become_a_state",
        ),
    ),
    "node id for after a reboot": Row(why="a line of text, with nothing to add"),
    "which mounts there are": Row(
        older=(
            "formats/test_left_records::test_what_a_run_directory_says",
            "formats/test_forms::test_a_mount_is_found_whatever_else_its_record_says",
        ),
        newer=("formats/test_forms::test_a_mount_is_found_whatever_else_its_record_says",),
    ),
    "bypassed mounts": Row(
        older=(
            "formats/test_left_records::test_what_processes_left_is_understood",
            "formats/test_newer::test_a_bypassed_mount_is_found_whatever_else_is_said_of_it",
        ),
        newer=("formats/test_newer::test_a_bypassed_mount_is_found_whatever_else_is_said_of_it",),
    ),
    "node id": Row(why="a line of text, with nothing to add"),
    "key of a member": Row(why="a standard form (PEM); what is not one is made anew"),
    "learnt sizes, history, expected volume": Row(
        older=(
            "formats/test_left_records::test_what_a_run_directory_says",
            "worker/test_learned::test_the_next_mount_expects_what_the_last_one_has_learnt",
        ),
        newer=(
            "worker/test_history::test_what_a_mount_has_kept_may_be_damaged",
            "mounting/test_expected::test_a_damaged_note_expects_nothing",
        ),
    ),
    "log of the daemon": Row(why="acpfs reads it never"),
    "list of `acpfs salvage`": Row(why="acpfs reads it never"),
    "what one supervisor leaves to the next": Row(
        older=(
            "formats/test_left_records::test_what_processes_left_is_understood",
            "supervisor/test_handover::test_open_files_go_on_with_the_other_version",
            BOTH_VERSIONS,
        ),
        newer=(
            "formats/test_newer::test_what_a_supervisor_left_is_not_gone_on_with",
            "supervisor/test_handover::test_what_a_newer_supervisor_says_is_refused_and_that_one_goes_on",
        ),
    ),
    "messages of supervisor, template, worker, keeper, hold process": Row(
        older=(
            "supervisor/test_handover::test_open_files_go_on_there_and_back",
            BOTH_VERSIONS,
        ),
        newer=(
            "supervisor/test_keeper_protocol::test_what_it_does_not_understand_ends_that_connection_and_nothing_else",
        ),
    ),
    "questions between a worker and its exchange process": Row(
        why="the same code on both sides: that worker has started it"
    ),
    "settings that go on": Row(
        older=(
            "formats/test_left_records::test_what_processes_left_is_understood",
            BOTH_VERSIONS,
        ),
        newer=(BOTH_VERSIONS,),
    ),
    "control socket": Row(
        older=(CONTRACT,),
        newer=(VERB,),
    ),
    "JSON of each verb": Row(
        older=(CONTRACT,),
        newer=("cli/test_reference::test_every_answer_of_a_verb_is_described",),
    ),
    "metrics": Row(
        older=(CONTRACT,),
        newer=("cli/test_reference::test_every_exit_code_and_metric_has_a_row",),
    ),
    "configuration": Row(
        older=(CONTRACT,),
        newer=("cli/test_config::test_a_bad_file_is_named",),
    ),
    "deployment": Row(why="read by other tools: `tests/cli/test_deploy.py` asks those"),
    "exit codes": Row(
        older=(CONTRACT,),
        newer=("cli/test_reference::test_every_exit_code_and_metric_has_a_row",),
    ),
    "questions and ranges (`exchange`)": Row(
        older=("formats/test_forms::test_a_member_of_another_exchange_is_told_ours_and_no_more",),
        newer=(
            "formats/test_forms::test_a_member_of_another_exchange_is_told_ours_and_no_more",
            "formats/test_forms::test_who_asks_a_member_of_another_exchange_is_told_which",
            "exchange/test_between_mounts::test_members_of_two_versions_say_so_and_read_the_storage",
        ),
    ),
    "copies (`copies`)": Row(
        older=(MEMBER,),
        newer=("exchange/test_holding::test_words_that_make_no_sense_are_refused_with_a_sentence",),
    ),
    "manifest of a gasp": Row(
        older=(
            "formats/test_left_records::test_what_processes_left_is_understood",
            "formats/test_newer::test_a_gasp_is_not_taken_for_none",
        ),
        newer=("formats/test_newer::test_a_gasp_is_not_taken_for_none",),
    ),
    "messages of ranks, coordinators, launchers": Row(
        older=(
            "formats/test_left_records::test_what_processes_left_is_understood",
            "formats/test_newer::test_a_message_names_who_has_another_acpfs",
        ),
        newer=("formats/test_newer::test_a_message_names_who_has_another_acpfs",),
    ),
    "what a coordinator leaves": Row(
        older=(
            "formats/test_left_records::test_what_processes_left_is_understood",
            "formats/test_forms::test_where_a_coordinator_is_may_be_said_with_more_words",
        ),
        newer=("formats/test_forms::test_where_a_coordinator_is_may_be_said_with_more_words",),
    ),
    "faults, drills": Row(
        older=(
            "formats/test_left_records::test_what_processes_left_is_understood",
            "formats/test_forms::test_lines_of_faults_that_have_another_form_are_left_out",
        ),
        newer=("formats/test_forms::test_lines_of_faults_that_have_another_form_are_left_out",),
    ),
    "what a rank that ends leaves": Row(
        older=("training/ranks/test_left_version::test_another_version_is_not_taken_and_stays",),
        newer=("training/ranks/test_left_version::test_another_version_is_not_taken_and_stays",),
    ),
    "tensors between ranks, spare processes, templates": Row(
        why="all ranks of a job have one acpfs: WIRE_VERSION refuses another one before"
    ),
    "checkpoints": Row(
        why="the framework's own, byte for byte: `tests/frameworks` loads them without acpfs"
    ),
    "MindIO's container": Row(
        older=("compatible/test_product_container::test_records_are_rewritten_as_torch_has_them",),
        newer=(
            "compatible/test_product_container::test_what_is_not_documented_is_refused",
            "compatible/test_product_container::test_what_is_damaged_is_refused_with_a_sentence",
        ),
    ),
}
