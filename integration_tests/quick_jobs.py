"""Quick starts of jobs in tests: without what each start repeats, and takes more time than the steps of a toy model."""

import importlib
import sys
from functools import cache
from typing import Any


def start_quickly() -> None:
    """Let jobs in this process, and in ranks that are forked from it, start without rehearsal, FLOPs and calls of git.

    They take 0.1 s in forked processes, far more with a model of `transformers`. A module whose tests need them sets
    `REHEARSES = True`. The files of imported modules are looked up once.
    """
    training: Any = importlib.import_module("d9d_loop.job.training")
    run_files: Any = importlib.import_module("d9d_loop.job.run_files")
    rehearse = training.rehearse

    def rehearse_if_asked(plan: Any) -> Any:
        frame = sys._getframe()
        while frame is not None:
            if frame.f_globals.get("REHEARSES"):
                return rehearse(plan)
            frame = frame.f_back
        return None

    training.rehearse = rehearse_if_asked
    run_files._commit = cache(run_files._commit)
    importlib.import_module("d9d_loop.engine.code_digest").source_digests()
