#!/bin/sh
# Slurm's Prolog: sees to it that the mount is there before the first process of a job. Runs as
# root on each node of the job.
#
# One mount per node serves all jobs and outlives them, so that what a job saved goes on to the
# backing directory after its end, and a
# job that is requeued finds its checkpoint in RAM.
# Where acpfs cannot mount, the backing directory itself is put at the mount point: jobs save
# more slowly, under the same path. With
# ACPFS_REQUIRED=yes the prolog fails instead; then Slurm drains the node and requeues the job.
set -u
. "$(dirname "$0")/acpfs.conf"
PATH=$ACPFS_PATH:/usr/sbin:/usr/bin:/sbin:/bin
export PATH

say() { logger -t acpfs-prolog -- "job ${SLURM_JOB_ID:-?}: $*" 2>/dev/null || true; }
answers() { # not where only a keeper answers
    said=$(timeout 10 acpfs-ctl "$ACPFS_MOUNTPOINT" status --json 2>/dev/null) || return 1
    case $said in *'"state": "held"'*) return 1 ;; esac
}
# What looks at a mount that only a keeper holds waits for the daemon that this script starts:
# hence the limits.
is_backing_itself() {
    timeout 10 sh -c 'mountpoint -q "$0" && [ "$0" -ef "$1" ]' "$ACPFS_MOUNTPOINT" "$ACPFS_BACKING"
}

exec 9>"$ACPFS_LOCK"
# two jobs may begin on a node at once
flock -w "$ACPFS_MOUNT_WAIT_S" 9 || say "another prolog holds $ACPFS_LOCK"
answers && exit 0
timeout 10 mkdir -p "$ACPFS_MOUNTPOINT"
if is_backing_itself; then
    # an earlier prolog's way out; jobs that are still on it keep it
    umount "$ACPFS_MOUNTPOINT" 2>/dev/null || exit 0
fi
# The daemon must not inherit the lock, nor the pipe on which slurmd waits for the end of this
# script.
# shellcheck disable=SC2086 # the options are words
why=$(timeout "$ACPFS_MOUNT_WAIT_S" \
    acpfs mount $ACPFS_OPTIONS "$ACPFS_BACKING" "$ACPFS_MOUNTPOINT" 2>&1 9>&-) && exit 0
answers && exit 0
say "no mount: $why"
[ "$ACPFS_REQUIRED" != yes ] || exit 1
mount --bind "$ACPFS_BACKING" "$ACPFS_MOUNTPOINT" && exit 0
say "the backing directory cannot be put at $ACPFS_MOUNTPOINT either"
exit 1 # a job must never save to the empty directory below the mount point
