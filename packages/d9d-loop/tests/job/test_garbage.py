import gc
import weakref
from collections.abc import Generator

import pytest

from d9d_loop.job.garbage import garbage_collection

REHEARSES = True  # see quick_jobs.py


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


@pytest.mark.slow
def test_garbage_is_collected_only_at_fixed_steps() -> None:
    with garbage_collection(3) as collect:
        assert not gc.isenabled()
        for step, is_alive in ((1, True), (2, True), (3, False)):
            cycle = weakref.ref(_Cycle())
            collect(step)
            assert (cycle() is not None) == is_alive
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_initial_objects_are_frozen() -> None:
    with garbage_collection(1):
        assert gc.get_freeze_count() > 0


def test_old_garbage_of_the_start_is_freed_by_the_first_collection() -> None:
    """It was alive at the rehearsal, and has reached the oldest generation."""
    old = _Cycle()
    gc.collect()
    cycle = weakref.ref(old)
    del old
    with garbage_collection(1) as collect:
        assert cycle() is not None
        collect(1)
        assert cycle() is None
        assert gc.get_freeze_count() > 0


def test_previously_frozen_objects_stay_frozen() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with garbage_collection(1):
        pass
    assert gc.get_freeze_count() > 0.9 * frozen  # except objects without references


def test_python_may_collect_by_itself() -> None:
    with garbage_collection(None) as collect:
        assert gc.isenabled()
        assert gc.get_freeze_count() == 0
        cycle = weakref.ref(_Cycle())
        gc.disable()
        collect(1)
        assert cycle() is not None
        gc.enable()


def test_disabled_collection_stays_disabled() -> None:
    gc.disable()
    with garbage_collection(1):
        assert gc.get_freeze_count() == 0
    assert not gc.isenabled()
