import gc
import weakref
from collections.abc import Generator
from contextlib import nullcontext

import pytest
import torch

from d9d_loop import Events, StepDone
from d9d_loop.job.garbage import GarbageCollection


class _Cycle:
    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def _python_collects() -> Generator[None]:
    was_enabled = gc.isenabled()
    gc.unfreeze()  # of what conftest.py froze
    gc.enable()
    yield
    gc.freeze()
    if not was_enabled:
        gc.disable()


def _done(step: int) -> StepDone:
    return StepDone(step, torch.ones(()), torch.ones(()), 0.1, nullcontext)


@pytest.mark.slow
def test_garbage_is_collected_only_at_fixed_steps() -> None:
    garbage, events = GarbageCollection(3), Events()
    events.subscribe(garbage)
    with garbage:
        assert not gc.isenabled()
        for step, is_alive in ((1, True), (2, True), (3, False)):
            cycle = weakref.ref(_Cycle())
            events.emit(_done(step))
            assert (cycle() is not None) == is_alive
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_initial_objects_are_frozen() -> None:
    with GarbageCollection(1):
        assert gc.get_freeze_count() > 0


def test_previously_frozen_objects_stay_frozen() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with GarbageCollection(1):
        pass
    assert gc.get_freeze_count() > 0.9 * frozen  # except objects without references


def test_python_may_collect_by_itself() -> None:
    garbage = GarbageCollection(None)
    with garbage:
        assert gc.isenabled()
        assert gc.get_freeze_count() == 0
        cycle = weakref.ref(_Cycle())
        gc.disable()
        garbage.collect(_done(1))
        assert cycle() is not None
        gc.enable()


def test_disabled_collection_stays_disabled() -> None:
    gc.disable()
    with GarbageCollection(1):
        assert gc.get_freeze_count() == 0
    assert not gc.isenabled()
