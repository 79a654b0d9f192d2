"""Settings of test runs in the root's conftest.py."""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d9d_dist.testing import run_ranks

pytest_plugins = ["pytester"]


def _drawn() -> list[Any]:
    drawn: list[Any] = []

    @given(st.integers(), st.floats(allow_nan=False), st.text())
    def draw(number: int, fraction: float, text: str) -> None:
        drawn.append((number, fraction, text))

    draw()
    return drawn


def test_drawn_examples_do_not_depend_on_loaded_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _drawn()
    lines = [f"x{number} = ({number}, {number}.5, 'text {number}')" for number in range(1000, 1200)]
    (tmp_path / "local_module_with_constants.py").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("local_module_with_constants")
    assert _drawn() == before
    del sys.modules["local_module_with_constants"]


def _parent() -> int:
    return os.getppid()


@pytest.mark.skipif(sys.platform != "linux" or sys.version_info >= (3, 14), reason="workers have servers of their own")
def test_ranks_are_forked_from_the_server_of_their_worker() -> None:
    """Another server would import torch, transformers and the test files again."""
    (server,) = run_ranks(_parent, world_size=1)
    assert server == os.getppid() or "PYTEST_XDIST_WORKER" not in os.environ


SUITE = """
import random, torch
from hypothesis import given, strategies as st

import pytest

@pytest.mark.parametrize("order", range(4))
def test_seeds(order):
    print("seeds", order, random.random(), torch.rand(()).item())

@given(st.integers())
def test_drawn(number):
    print("seeds", number)

@pytest.mark.full
@pytest.mark.long
def test_full(exhaustive):
    assert exhaustive

@pytest.mark.parametrize("case", ["a", "b"])
@pytest.mark.sample("b")
def test_sampled(case, exhaustive):
    assert exhaustive or case == "b"

@pytest.mark.parametrize("case", ["a", "b", "c"])
@pytest.mark.sample("b")
@pytest.mark.slow("c")
def test_slow_case(case, exhaustive, pytestconfig):
    assert exhaustive or case == ("c" if pytestconfig.option.slow else "b")

@pytest.mark.slow
def test_slow(exhaustive, pytestconfig):
    assert exhaustive or pytestconfig.option.slow

@pytest.mark.parametrize(
    "reason", ["needs 4 accelerators", "needs an accelerator", "needs abc, which is optional", "x"]
)
def test_skipped(reason):
    pytest.skip(reason)
"""


# Importing torch takes seconds.
WITHOUT_TORCH = SUITE.replace("random, torch", "random").replace(", torch.rand(()).item()", "")


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    """Create a folder of tests with the root's conftest.py."""
    folder = Path(__file__).resolve().parent
    pytester.makeconftest((folder.parent / "conftest.py").read_text(encoding="utf-8"))
    for name in ("forked_workers.py", "collected_tests.py", "quick_jobs.py"):
        (pytester.path / name).write_text((folder / name).read_text(encoding="utf-8"), encoding="utf-8")
    pytester.makepyfile(SUITE)
    return pytester


@pytest.fixture
def suite_without_torch(suite: pytest.Pytester) -> pytest.Pytester:
    suite.makepyfile(WITHOUT_TORCH)
    return suite


def _lines(suite: pytest.Pytester, *arguments: str) -> list[str]:
    result = suite.runpytest_subprocess("-s", "-p", "no:xdist", *arguments)
    return [line for line in result.outlines if "seeds" in line]


@pytest.mark.full
@pytest.mark.long
@pytest.mark.parametrize("name", ["suite", "suite_without_torch"])
@pytest.mark.sample("suite_without_torch")
def test_seeds_and_order_change_only_on_demand(name: str, request: pytest.FixtureRequest) -> None:
    suite = request.getfixturevalue(name)
    fixed = _lines(suite)
    assert len(fixed) > 50
    assert _lines(suite) == fixed
    drawn = _lines(suite, "--randomly-seed=7")
    assert sorted(drawn) != sorted(fixed)
    assert _lines(suite, "--randomly-seed=7") == drawn


@pytest.mark.full
@pytest.mark.long
def test_a_run_lists_what_it_skips(suite_without_torch: pytest.Pytester) -> None:
    result = suite_without_torch.runpytest_subprocess("-n2")
    result.assert_outcomes(passed=7, skipped=4)
    result.stdout.fnmatch_lines(["*test_a_run_lists_what_it_skips.py is done; tests left: none"])
    assert "4 skipped: 2 need accelerators; 1 (x); 1 need abc" in result.outlines
    assert "2 run only with --slow, in .ci/run, or with --all" in result.outlines
    assert "3 run only with --all: 3 in the lane jobs of .ci/nightly" in result.outlines


def test_the_flag_all_runs_every_test(suite_without_torch: pytest.Pytester) -> None:
    result = suite_without_torch.runpytest_subprocess("-p", "no:xdist", "--all", "-v")
    result.assert_outcomes(passed=12, skipped=4)
    assert "::test_full " in next(line for line in result.outlines if "::" in line), "long tests run first"


@pytest.mark.full
def test_the_flag_slow_runs_only_slow_cases(suite_without_torch: pytest.Pytester) -> None:
    result = suite_without_torch.runpytest_subprocess("-n2", "--slow", "-v")
    result.assert_outcomes(passed=2)
    assert "3 run only with --all: 3 in the lane jobs of .ci/nightly" in result.outlines
    assert not any("only with --slow" in line for line in result.outlines)


@pytest.mark.full
def test_a_lane_runs_all_its_cases(suite_without_torch: pytest.Pytester) -> None:
    suite_without_torch.runpytest_subprocess("-n2", "--lane", "jobs").assert_outcomes(passed=12, skipped=4)
    suite_without_torch.runpytest_subprocess("-p", "no:xdist", "--lane", "oracle").assert_outcomes()


@pytest.mark.full
def test_a_sample_names_existing_cases(suite_without_torch: pytest.Pytester) -> None:
    suite_without_torch.makepyfile(WITHOUT_TORCH.replace('sample("b")', 'sample("c")'))
    result = suite_without_torch.runpytest_subprocess("-p", "no:xdist", "--collect-only")
    result.stdout.fnmatch_lines(["*test_sampled: the marker sample names {'c'}; expected some of a, b*"])


@pytest.mark.full
def test_bytecode_is_cached_if_the_environment_forbids_to_write_it(
    suite_without_torch: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    suite_without_torch.runpytest_subprocess("-p", "no:xdist", "--collect-only")
    assert list((suite_without_torch.path / ".pytest_cache" / "bytecode").rglob("test_*.pyc"))
    assert not list(suite_without_torch.path.glob("__pycache__"))
