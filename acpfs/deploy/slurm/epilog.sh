#!/bin/sh
# Slurm's Epilog: gives what a job saved a moment to reach the backing directory. Runs as root on
# each node of the job.
#
# The mount stays: what is not persisted after ACPFS_EPILOG_WAIT_S goes on being copied while the
# node takes its next job. Never fails, because Slurm drains a node whose epilog does.
trap 'exit 0' EXIT # whatever is wrong here, or in its settings
set -u
. "$(dirname "$0")/acpfs.conf"
PATH=$ACPFS_PATH:/usr/sbin:/usr/bin:/sbin:/bin
export PATH

[ "$ACPFS_EPILOG_WAIT_S" != 0 ] || exit 0
if ! left=$(acpfs-ctl "$ACPFS_MOUNTPOINT" flush --timeout "$ACPFS_EPILOG_WAIT_S" 2>&1); then
    late="after $ACPFS_EPILOG_WAIT_S s not persisted, and going on: $left"
    logger -t acpfs-epilog -- "job ${SLURM_JOB_ID:-?}: $late" 2>/dev/null
fi
