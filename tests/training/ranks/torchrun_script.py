"""What a user's script is, started by torchrun, with a rank that kills itself.

Arguments: directory, kind of job, rank, point.
"""

import os
import sys
from pathlib import Path

sys.path.append(os.environ["LIBRARIES"])

from tests.training.ranks.gasps import Fault, train

train(
    int(os.environ["RANK"]), Fault(sys.argv[2], {int(sys.argv[3]): sys.argv[4]}), Path(sys.argv[1])
)
