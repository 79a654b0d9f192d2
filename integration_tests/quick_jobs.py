"""Jobs of tests start without the rehearsal and the measurement of FLOPs, which take 0.1 s in a forked process.

A module whose tests are about them sets `REHEARSES = True`; with `--all` or `--slow`, every job rehearses.
"""

import importlib
import sys
from typing import Any


def skip_rehearsals() -> None:
    """Let jobs in this process, and in ranks that are forked from it, rehearse only below modules that ask for it."""
    training: Any = importlib.import_module("d9d_loop.job.training")
    rehearse = training.rehearse

    def rehearse_if_asked(plan: Any) -> Any:
        frame = sys._getframe()
        while frame is not None:
            if frame.f_globals.get("REHEARSES"):
                return rehearse(plan)
            frame = frame.f_back
        return None

    training.rehearse = rehearse_if_asked
