"""Quick starts of jobs in tests: without what each start repeats, and takes more time than the steps of a toy model."""

import importlib
import os
import sys
from collections.abc import Sequence
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock


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


def fork_quick_ranks() -> None:
    """Let also ranks start jobs quickly whose server is started by this process, because no worker was forked."""
    preload = forkserver.set_forkserver_preload

    def preload_quick_ranks(modules: Sequence[str]) -> None:
        preload([*modules, "quick_ranks"])
        # The server ignores the `sys.path` that Python passes to it.
        paths = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
        with mock.patch.dict(os.environ, PYTHONPATH=paths):
            forkserver.ensure_running()

    forkserver.set_forkserver_preload = preload_quick_ranks  # ty: ignore[invalid-assignment]
