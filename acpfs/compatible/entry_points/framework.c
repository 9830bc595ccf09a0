/* Where the runtime of MindSpore says that an update begins; `update_marks.py` reads it. Built when it is first needed. */
#include <stdatomic.h>
#include <stdint.h>

_Atomic int64_t acpfs_updating; /* 1 from the begin of an update to its end */
_Atomic int64_t acpfs_finished; /* the newest step that was said to be done here; 0: none */
_Atomic int64_t acpfs_held;     /* 1: no update is to begin */
