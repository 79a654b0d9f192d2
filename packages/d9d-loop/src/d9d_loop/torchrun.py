"""Command `d9d-torchrun`: torchrun, with an exit code that schedulers can act on.

torchrun exits with 1 for every failure. This command exits with the code of the rank of this node that failed first, so
a scheduler distinguishes a user error (2) from a hang (124). After a signal, it prints no traceback. Arguments and
behavior are otherwise those of torchrun.
"""

import os
import sys
from collections.abc import Sequence

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from d9d_loop.resilience.exit_codes import QUIET_TORCHRUN


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command: `d9d-torchrun ARGUMENTS`.

    Raises:
        SystemExit: If a rank failed, with its exit code, or 128 plus the number of the signal that killed it. If this
            process received a signal, with 128 plus its number.
    """
    os.environ[QUIET_TORCHRUN] = "1"
    try:
        run.main(None if arguments is None else list(arguments))
    except ChildFailedError as failed:
        print(failed, file=sys.stderr)
        _, first = failed.get_first_failure()
        raise SystemExit(first.exitcode if first.exitcode > 0 else 128 - first.exitcode) from None
    except SignalException as received:
        raise SystemExit(128 + received.sigval) from None


if __name__ == "__main__":
    main()
