"""What may go wrong in one row and leave the others to run, and all that is to be known of it afterwards."""

import sys
import traceback
from pathlib import Path
from subprocess import SubprocessError

from triton.errors import TritonError

from millrace.errors import MillraceError

# Of a device and its libraries, of Triton's compiler, and mistakes of ours that only a device shows.
FAILURES = (
    MillraceError, RuntimeError, TritonError, SubprocessError, OSError, ImportError, AssertionError, AttributeError,
    NameError, LookupError, ArithmeticError, TypeError, ValueError,
)  # fmt: skip
_FOLDERS = f"{Path(__file__).parents[2]}/", f"{sys.prefix}/", f"{sys.base_prefix}/", f"{Path.home()}/"


def traced() -> str:
    """Of the error that is being handled: its whole traceback, with no paths of this machine."""
    told = traceback.format_exc()
    for folder in _FOLDERS:
        told = told.replace(folder, "")
    return told
