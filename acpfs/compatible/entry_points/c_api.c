/* The two C entry points of the product. 0: taken; 1: refused, since the job is being stopped or the number makes no sense. */
#include <stdatomic.h>
#include <stdint.h>

extern _Atomic int64_t acpfs_updating, acpfs_finished, acpfs_held;

int MindioTtpSetOptimStatusUpdating(int64_t backup_step)
{
    if (backup_step != -1) {
        return 1; /* copies of the state before an update are not kept */
    }
    atomic_store(&acpfs_updating, 1); /* first the mark, then the look: one of this and the hold sees the other */
    if (atomic_load(&acpfs_held)) {
        atomic_store(&acpfs_updating, 0);
        return 1;
    }
    return 0;
}

int MindioTtpSetOptimStatusFinished(int64_t step)
{
    if (step < 1) {
        return 1;
    }
    atomic_store(&acpfs_finished, step);
    atomic_store(&acpfs_updating, 0);
    return 0;
}
