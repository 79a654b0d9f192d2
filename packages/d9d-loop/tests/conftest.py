"""Shared fixtures: a job of one process, and imports of shared test modules."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from d9d_dist import DistributedContext, MeshConfig

sys.path.append(str(Path(__file__).parent))


@pytest.fixture
def ctx() -> Iterator[DistributedContext]:
    with MeshConfig().build() as ctx:
        yield ctx


@pytest.fixture
def trl_without_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tests import trl without wandb, which takes most of the time of its import."""
    if "wandb" not in sys.modules:
        monkeypatch.setitem(sys.modules, "wandb", None)


@pytest.fixture
def rehearses(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let jobs that a test starts in this process be rehearsed; see `quick_jobs.py`."""
    monkeypatch.setitem(vars(request.module), "REHEARSES", True)
