"""How a part of the product that acpfs has not got says so: one sentence, raised where it is asked
for.
"""

from acpfs.errors import AcpfsError, ExitCode
from acpfs.training.guard import OnPurposeError


class UnsupportedError(OnPurposeError, AcpfsError, NotImplementedError):
    """The product offers it, acpfs does not; the message says what to do instead.

    Callers of the product catch RuntimeError.
    """

    exit_code = ExitCode.REFUSED
