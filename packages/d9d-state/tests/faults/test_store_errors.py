"""An error at any call of a save is raised, fails only that save, and the job can save again."""

import errno
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from file_calls import Fail, Fault, FullDisk, count_calls, file_calls
from tiny_checkpoint import assert_goes_on, begin, save, step_of_newest

from d9d_state import CheckpointStore, StateError

_FAULTS: dict[str, tuple[Callable[[int], Fault], str]] = {
    "EIO": (Fail, "Input/output error"),
    "ENOSPC once": (lambda at: Fail(at, errno.ENOSPC), "No space left on device"),
    "a full disk": (FullDisk, "No space left on device"),
}


@pytest.mark.parametrize("kind", _FAULTS)
@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("older", [(), (1, 2)], ids=["fresh", "retention"])
@pytest.mark.slow(
    "retention-background-EIO",
    "retention-background-ENOSPC once",
    "retention-background-a full disk",
    "retention-foreground-ENOSPC once",
)
def test_error_at_any_call_fails_only_that_save(
    tmp_path: Path,
    *,
    kind: str,
    older: tuple[int, ...],
    background: bool,
    points: Callable[..., Sequence[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    fault_at, text = _FAULTS[kind]
    start, folder = tmp_path / "start", tmp_path / "checkpoints"
    start.mkdir()
    begin(start, *older)
    shutil.copytree(start, folder)
    raised = 0
    count = count_calls(folder, lambda: save(CheckpointStore(folder, keep_last=1), 3, background=background))
    for at in points(count, stride=6):
        shutil.rmtree(folder)
        shutil.copytree(start, folder)
        store, fault = CheckpointStore(folder, keep_last=1), fault_at(at)
        caplog.clear()
        message = None
        with file_calls(folder, fault):
            try:
                save(store, 3, background=background)
            except StateError as error:
                message = str(error)
                raised += 1
        newest = step_of_newest(store)
        assert newest in (older[-1] if older else None, 3), f"call {at}"
        if message is None:
            # Errors after the commit, such as in deletions, are only logged.
            assert newest == 3, f"call {at}"
        else:
            assert text in message, f"call {at}"
            assert "step-00000003 could not be" in message, f"call {at}"
        assert message is not None or text in caplog.text or _is_harmless(fault), f"call {at} failed silently"
        assert_goes_on(store)
    assert raised > 0


def _is_harmless(fault: Fault) -> bool:
    """Return True if no call failed: a full disk does not affect the calls after the last write."""
    return isinstance(fault, FullDisk) and fault.hit is None
