#!/bin/sh
# Slurm's TaskProlog: tells each task where to save. Runs as the job's user; Slurm carries out
# what it prints.
#
# ACPFS_DIR is the path to save to, ACPFS_SERVED says whether acpfs is behind it (yes) or the
# backing directory itself (no).
set -u
. "$(dirname "$0")/acpfs.conf"
PATH=$ACPFS_PATH:/usr/sbin:/usr/bin:/sbin:/bin
export PATH

echo "export ACPFS_DIR=$ACPFS_MOUNTPOINT"
if grep -qF " $ACPFS_MOUNTPOINT fuse.acpfs " /proc/self/mounts; then
    echo "export ACPFS_SERVED=yes"
else
    echo "export ACPFS_SERVED=no"
    where="$ACPFS_MOUNTPOINT on $(uname -n)"
    echo "print acpfs does not serve $where: saves go straight to $ACPFS_BACKING"
fi
