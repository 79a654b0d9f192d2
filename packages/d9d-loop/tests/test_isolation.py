"""What must not change the training: here, pauses of Python's garbage collection."""

import gc

import pytest

from d9d_loop.isolation import paused_collection


@pytest.mark.parametrize("enabled", [True, False])
def test_collections_are_paused_and_then_as_before(enabled: bool) -> None:
    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with paused_collection():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
