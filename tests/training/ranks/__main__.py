"""pytest under the interpreter that has torch.

Arguments: a directory with pytest and what acpfs depends on, then pytest's own.
"""

import os
import sys

sys.path.append(sys.argv[1])  # behind its own: only what is missing there comes from here
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["GLOO_SOCKET_IFNAME"] = "lo"

import pytest

sys.exit(pytest.main(sys.argv[2:]))
