"""Settings of every test run: fixed seeds, the flags `--slow` and `--all`, progress by package, and a summary.

Also used when one package is tested alone, from its wheel.
"""

import gc
import importlib
import logging
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterable
from contextlib import suppress
from itertools import count
from multiprocessing import util
from pathlib import Path
from typing import Any
from unittest import mock
from zlib import crc32

import pytest

# One thread in each process: the tensors are tiny, and a second thread would only wait for its turn on a busy core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch's TCPStore resolves the name of each address it connects to, and a lost DNS query stalls for 5 s. No test needs
# DNS: names are those of /etc/hosts.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
if sys.dont_write_bytecode:  # else each process of each test compiles torch and transformers again
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(Path(__file__).parent / ".pytest_cache" / "bytecode")
    os.environ.update(PYTHONDONTWRITEBYTECODE="", PYTHONPYCACHEPREFIX=sys.pycache_prefix)

# filelock calls a function of Python at each event of the interpreter's audit, to find forks while it opens a lock.
with mock.patch.object(sys, "addaudithook"), suppress(ImportError):
    importlib.import_module("filelock")

# After the lines above, so that the bytecode of hypothesis is cached too.
from _pytest.logging import catching_logs
from forked_workers import fork_workers
from hypothesis import core, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from quick_jobs import fork_quick_ranks, start_quickly

_LANES = {
    "integration_tests/test_oracle.py": "oracle",
    "integration_tests/test_mutants.py": "oracle",
    "integration_tests/test_job_ends.py": "ends",
    "integration_tests/test_slurm.py": "slurm",
}
_EXCLUDED = pytest.StashKey[Counter[str]]()
"""Number of cases by the lane of .ci/nightly that runs them, and of slow ones."""

# Hypothesis also draws constants from the sources of the local modules that are loaded. That set depends on the order
# of the tests, and modules of an installed wheel are not local. Without it, drawn examples depend on the seed alone.
providers._get_local_constants = Constants


def _attach_to_root(catching: Any) -> logging.Handler:
    """Capture the messages that reach the root logger, and not those of torch's loggers, which print theirs.

    pytest visits all loggers of torch and transformers six times per test: a quarter of the time of a test of nothing.
    """
    root = logging.getLogger()
    root.addHandler(catching.handler)
    catching.attached_loggers.append(root)
    if catching.level is not None:
        catching.handler.setLevel(catching.level)
        catching.orig_level = root.level
        root.setLevel(min(root.level, catching.level))
    return catching.handler


if "attached_loggers" in getattr(catching_logs, "__slots__", ()):  # other versions of pytest visit the root only
    catching_logs.__enter__ = _attach_to_root

settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
settings.register_profile("random", database=None, deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flags `--slow`, `--all` and `--lane`."""
    parser.addoption("--slow", action="store_true", help="run the slow cases that .ci/run adds, and no others")
    parser.addoption("--all", action="store_true", help="run also the cases that the default run leaves to CI")
    parser.addoption("--lane", help="run all cases of a lane of .ci/nightly, and no others")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Return one worker more than cores: tests wait for disks, timeouts and ranks about a quarter of their time."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    return (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Fork the workers from one process where that is safe."""
    if sys.platform == "linux":
        fork_workers(config)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Fix the order and the seeds of tests, unless `--randomly-seed` is given."""
    config.addinivalue_line("markers", "full: a case that runs only with --all")
    config.addinivalue_line("markers", "long: a test of many seconds, which runs first")
    config.addinivalue_line("markers", "sample(*ids): cases of a parametrized test that run without --all")
    config.addinivalue_line("markers", "slow(*ids): cases, or a whole test, that run only with --slow or --all")
    is_fixed = getattr(config.option, "randomly_seed", "default") == "default"
    if is_fixed:
        config.option.randomly_seed = 0
        config.option.randomly_reorganize = False
    settings.load_profile("fixed" if is_fixed else "random")
    gc.disable()  # collection makes no garbage; then `_collect_garbage` does it between tests
    config.option.all |= config.option.lane is not None
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Progress(config))
        _set_temporary_folder()


def _set_temporary_folder() -> None:
    """Create the temporary files of tests in one folder, which is deleted at exit.

    torchrun never deletes its folder, and a rank that is killed cannot. `tmp_path` stays where pytest creates it.
    """
    if "PYTEST_DEBUG_TEMPROOT" in os.environ:  # a test runs pytest
        return
    os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.gettempdir()
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="d9d-tests-")
    # After the finalizer of multiprocessing's own folder, whose priority is -100.
    util.Finalize(None, shutil.rmtree, (tempfile.tempdir, True), exitpriority=-200)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Seed hypothesis too, if `--randomly-seed` is given."""
    if settings.get_current_profile_name() == "random":
        core.global_force_seed = session.config.option.randomly_seed


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, object, object]:
    """Mark the cases that the markers `sample` and `slow` of their test do not name."""
    made = yield
    cases = [case for case in made if isinstance(case, pytest.Function)] if isinstance(made, list) else []
    if not cases:
        return made
    named = {name: marker.args for name in ("sample", "slow") if (marker := cases[0].get_closest_marker(name))}
    for name, sample in named.items():
        if unknown := set(sample) - {_case(case) for case in cases}:
            ids = ", ".join(map(_case, cases))
            raise pytest.UsageError(
                f"{cases[0].originalname}: the marker {name} names {unknown}; expected some of {ids}"
            )
    if "sample" in named:
        for case in cases:
            if not any(_case(case) in sample for sample in named.values()):
                case.add_marker("full")
    return made


def _case(item: pytest.Item) -> str:
    return item.callspec.id if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""


def _marker(item: pytest.Item) -> str:
    """Return the marker that excludes a case from the default run, or an empty string."""
    if item.get_closest_marker("full"):
        return "full"
    slow = item.get_closest_marker("slow")
    return "slow" if slow and (not slow.args or _case(item) in slow.args) else ""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the cases that run only with `--all`, and those of other lanes. Long tests run first.

    A long test at the end would keep one worker busy while the others have nothing left to run.
    """
    if lane := config.option.lane:
        items[:] = [item for item in items if _lane(item.nodeid) == lane]
    elif not config.option.all:
        by_marker: dict[str, list[pytest.Item]] = {"": [], "slow": [], "full": []}
        for item in items:
            by_marker[_marker(item)].append(item)
        items[:] = by_marker["slow" if config.option.slow else ""]
        slow = Counter(slow=0 if config.option.slow else len(by_marker["slow"]))
        config.stash[_EXCLUDED] = slow + Counter(_lane(item.nodeid) for item in by_marker["full"])
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the number of excluded cases from a worker to the process that prints the summary."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["excluded"] = dict(session.config.stash.get(_EXCLUDED, {}))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed torch for the fixtures of a test, as pytest-randomly seeds Python and NumPy."""
    _seed_torch(item)
    _collect_garbage()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Seed torch for a test."""
    _seed_torch(item)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many tests were skipped, and why, and the lanes of the cases that run only with `--all`."""
    reports = terminalreporter.stats.get("skipped", [])
    if reports:
        kinds = Counter(_kind(report.longrepr[2]) for report in reports)
        by_count = sorted(kinds.items(), key=lambda item: (-item[1], item[0]))
        text = "; ".join(f"{count} {kind}" for kind, count in by_count)
        terminalreporter.write_line(f"{len(reports)} skipped: {text}")
    excluded = terminalreporter.config.stash.get(_EXCLUDED, Counter())
    if slow := excluded.pop("slow", 0):
        terminalreporter.write_line(f"{slow} run only with --slow, in .ci/run, or with --all")
    if excluded:
        text = ", ".join(f"{count} in the lane {lane}" for lane, count in sorted(excluded.items()))
        terminalreporter.write_line(f"{excluded.total()} run only with --all: {text} of .ci/nightly")


@pytest.fixture(scope="session")
def exhaustive(pytestconfig: pytest.Config) -> bool:
    """True if the run has the flag `--all` or `--lane`."""
    return pytestconfig.option.all


class _Progress:
    """Reports each package whose tests are done, and the number of remaining tests of the others."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._left: Counter[str] = Counter()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._count(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._count(ids)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        # Every worker collects the same tests. A worker that crashed has no output.
        if excluded := getattr(node, "workeroutput", {}).get("excluded"):
            self._config.stash[_EXCLUDED] = Counter(excluded)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        package = _package(nodeid)
        self._left[package] -= 1
        if not self._left[package]:
            del self._left[package]
            left = ", ".join(f"{name} {count}" for name, count in self._left.items()) or "none"
            reporter = self._config.pluginmanager.get_plugin("terminalreporter")
            reporter.ensure_newline()
            reporter.write_line(f"{package} is done; tests left: {left}")

    def _count(self, ids: Iterable[str]) -> None:
        if not self._left:  # every worker collects the same tests
            self._left.update(map(_package, ids))


_num_modules = 0
_setups = count(1)


def _collect_garbage() -> None:
    """Collect garbage before every 50th test, and exclude the objects of imported modules from collections.

    A trainer collects at its start, and the modules of the whole test suite are millions of objects.
    """
    global _num_modules  # noqa: PLW0603
    if has_new_modules := len(sys.modules) > 1.01 * _num_modules:
        _num_modules = len(sys.modules)
    if has_new_modules or next(_setups) % 50 == 0:
        gc.collect()
    if has_new_modules:
        gc.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter free all objects at its exit; Triton prints a list of all its types otherwise."""
    if multiprocessing.parent_process() is None:  # forked workers exit without that; pytest would collect for seconds
        gc.unfreeze()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Import what takes seconds before the server of `run_ranks` starts, if a test uses it: forked ranks inherit it."""
    if any(b"transformers" in path.read_bytes() for path in {item.path for item in session.items}):
        with suppress(ImportError):
            importlib.import_module("transformers.modeling_utils")
            importlib.import_module("peft")
    if not (session.config.option.all or session.config.option.slow) and "d9d_loop.job.trainer" in sys.modules:
        start_quickly()
        fork_quick_ranks()


def _seed_torch(item: pytest.Item) -> None:
    if torch := sys.modules.get("torch"):  # tests without torch do not import it
        # Without an accelerator `torch.manual_seed` formats the stack for each kind of accelerator.
        seed = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
        seed(item.config.option.randomly_seed + crc32(item.nodeid.encode()))


def _package(nodeid: str) -> str:
    folder, *rest = nodeid.partition("::")[0].split("/")
    return rest[0] if folder == "packages" else folder


def _lane(nodeid: str) -> str:
    """Return the lane of .ci/nightly that runs all cases of a test."""
    file, _, test = nodeid.partition("::")
    if file == "integration_tests/test_zoo.py":
        return "zoo-libraries" if "library_modules" in test else "zoo-torch"
    if file.startswith("integration_tests/hosts/"):
        return "hosts"
    return _LANES.get(file, "packages" if file.startswith("packages/") else "jobs")


def _kind(reason: str) -> str:
    """Return the reason of a skipped test, as words after a number."""
    reason = reason.removeprefix("Skipped: ")
    if "accelerator" in reason:
        return "need accelerators"
    module = re.search(r"needs (\w+), which is optional|could not import '([\w.]+)'", reason)
    return f"need {module[1] or module[2]}" if module else f"({reason})"
