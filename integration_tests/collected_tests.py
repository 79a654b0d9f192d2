"""Collects the tests in the process from which workers and ranks are forked, so that they inherit the modules."""

import atexit
import gc
import importlib
import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from forked_workers import ARGUMENTS

arguments = json.loads(os.environ.pop(ARGUMENTS))
os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].partition(os.pathsep)[2]
# Workers report errors of the collection; they collect again. The plugin would collect garbage at the end.
with Path(os.devnull).open("w") as null, redirect_stdout(null), redirect_stderr(null):
    pytest.main([*arguments, "--collect-only", "-qq", "-n0", "-p", "no:unraisableexception"])
if "d9d_dist.testing" in sys.modules:  # the ranks of tests are forked from this process too
    importlib.import_module("d9d_dist.testing._preload")
for name in [name for name in sys.modules if name.rpartition(".")[2] == "conftest"]:
    del sys.modules[name]  # it changes `sys.path`, which a worker gets from the main process
gc.collect()
gc.freeze()
atexit.register(os._exit, 0)  # Triton lists its leaks when an interpreter is finalized
