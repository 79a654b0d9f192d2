"""Quick starts of jobs in tests: without what each start repeats, and takes more time than the steps of a toy model."""

import importlib
import os
import sys
from collections.abc import Sequence
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock


def start_quickly() -> None:
    """Let jobs in this process, and in ranks that are forked from it, start without rehearsal, FLOPs and calls of git.

    They take 0.1 s in forked processes, far more with a model of `transformers`. A module whose tests need them sets
    `REHEARSES = True`. The health check has small tensors, unless its section sets their sizes. Digests of the user's
    code leave out the modules that are imported now, which are those of all tests.
    """
    training: Any = importlib.import_module("d9d_loop.job.training")
    run_files: Any = importlib.import_module("d9d_loop.job.run_files")
    start: Any = importlib.import_module("d9d_loop.engine.start")
    rehearse, check_health = training.rehearse, start.check_health

    def rehearse_if_asked(plan: Any) -> Any:
        frame = sys._getframe()
        while frame is not None:
            if frame.f_globals.get("REHEARSES"):
                return rehearse(plan)
            frame = frame.f_back
        return None

    def check_with_small_tensors(config: Any, **options: Any) -> Any:
        small = {"memory_mib": 1, "message_mib": 1, "matrix_size": 32}
        given = {name: getattr(config, name) for name in config.model_fields_set}
        return check_health(config.model_copy(update={**small, **given}), **options)

    training.rehearse, start.check_health = rehearse_if_asked, check_with_small_tensors
    if configurations := sys.modules.get("transformers.configuration_utils"):
        # Each read of a configuration formats it for a message of the level "info".
        configurations.PreTrainedConfig.__repr__ = object.__repr__
    run_files._commit = cache(run_files._commit)
    code_digest: Any = importlib.import_module("d9d_loop.engine.code_digest")
    digests, of_tests = code_digest.source_digests, frozenset(sys.modules)

    def digests_of_other_modules(weights: Path | None = None, **options: Any) -> dict[str, str]:
        others = {name: sys.modules[name] for name in sys.modules.keys() - of_tests}
        with mock.patch.object(code_digest, "sys", SimpleNamespace(modules=others)):
            return digests(weights, **options)

    for name in ("d9d_loop.job.plan", "d9d_loop.inference.inference"):
        importlib.import_module(name).source_digests = digests_of_other_modules  # ty: ignore[missing-attribute]


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
