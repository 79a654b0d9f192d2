"""A process at its limit of open files reports the limit, and does not treat checkpoints as damaged."""

import errno
import logging
import os
import re
import resource
from pathlib import Path
from typing import Any

import pytest
from rank_jobs import ranks
from tiny_checkpoint import begin, save, step_of_newest
from torch import nn

from d9d_dist import UserError
from d9d_dist.testing import run_ranks
from d9d_state import CheckpointStore, StateError, load_model_state

_ADVICE = f"the limit of this process is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} open files. Raise the limit"


def _full(path: object, *_args: Any, **_options: Any) -> Any:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))


def _look_with_limit(folder: str, limited: int) -> list[str]:
    logging.getLogger("d9d.state").setLevel(logging.ERROR)
    messages = []
    with ranks() as ctx:
        store = CheckpointStore(folder)
        for verify in (True, False):
            with pytest.MonkeyPatch.context() as patch:
                if ctx.rank == limited:
                    patch.setattr(os, "open", _full)
                with pytest.raises(StateError) as caught:
                    store.newest(ctx, verify=verify)
            messages.append(str(caught.value))
            ctx.barrier()
        newest = store.newest(ctx)
        assert newest is not None
        assert newest.step == 2
        with pytest.raises(UserError, match="step-00000002 exists and is complete"):
            store.save(2, {}, ctx=ctx)
    return messages


@pytest.mark.parametrize("limited", [0, 1])
def test_no_rank_falls_back_to_an_older_checkpoint(tmp_path: Path, limited: int) -> None:
    begin(tmp_path, 1, 2)
    found = run_ranks(_look_with_limit, str(tmp_path), limited)
    assert found[0] == found[1]
    for message in found[0]:
        assert message.startswith(f"rank {limited}: ")
        assert "Too many open files" in message
        assert _ADVICE in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_checkpoint_that_cannot_be_opened_is_not_moved_aside(tmp_path: Path) -> None:
    begin(tmp_path, 1, 2)
    store = CheckpointStore(tmp_path, run_id="known")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", _full)
        with pytest.raises(StateError, match=rf"step-00000002 cannot be read: .*{_ADVICE}"):
            save(store, 2)
        with pytest.raises(StateError, match=_ADVICE):
            store.complete()
        with pytest.raises(StateError, match=rf"{re.escape(str(tmp_path))} could not be locked: .*{_ADVICE}"):
            store.locked().__enter__()
        with pytest.raises(StateError, match=rf"step-00000003 could not be written: .*{_ADVICE}"):
            save(store, 3)
    assert step_of_newest(CheckpointStore(tmp_path)) == 2


def test_unlistable_folder_is_not_treated_as_partial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path, 1)
    (tmp_path / "step-00000002.partial").mkdir()
    monkeypatch.setattr(Path, "iterdir", _full)
    message = rf"^{re.escape(str(tmp_path))} cannot be read: \[Errno 24\] Too many open files: .*{_ADVICE}"
    with pytest.raises(StateError, match=message):
        CheckpointStore(tmp_path).discard_partials()
    with pytest.raises(StateError, match=message):
        CheckpointStore(tmp_path).complete()


@pytest.mark.parametrize(
    ("number", "kind", "text"),
    [
        (errno.EMFILE, StateError, rf"model.safetensors cannot be opened: .*{_ADVICE}"),
        (errno.EACCES, UserError, r"model.safetensors cannot be read: Permission denied\.$"),
        (errno.ENOENT, UserError, r"cannot be read: No such file or directory\. The folder is incomplete; download"),
    ],
)
def test_only_an_absent_file_makes_a_model_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception], text: str
) -> None:
    (tmp_path / "model.safetensors").touch()

    def fail(path: object, *_args: Any, **_options: Any) -> Any:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(kind, match=text):
        load_model_state(nn.Linear(1, 1), tmp_path)
