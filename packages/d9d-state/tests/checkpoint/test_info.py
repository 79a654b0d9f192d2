import re
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from d9d_dist import UserError
from d9d_state import CheckpointStore, Retention, StateError
from d9d_state.checkpoint.info import folder_name, open_complete, step_of


@pytest.mark.parametrize(("step", "name"), [(0, "step-00000000"), (100, "step-00000100"), (10**9, "step-1000000000")])
def test_folder_name_encodes_step(step: int, name: str) -> None:
    assert folder_name(step) == name
    assert step_of(name) == step


@pytest.mark.parametrize(
    "name", ["step-100", "step-000000100", "step-00000100.bak", "Step-00000100", "step--0000100", ""]
)
def test_other_folder_names_are_not_checkpoints(name: str) -> None:
    assert step_of(name) == -1


@pytest.mark.parametrize("step", [-1, True, 1.5, 2.0, "3", None, torch.tensor(3)])
def test_other_values_than_a_step_are_an_error(step: Any) -> None:
    with pytest.raises(UserError, match=rf"got step = {re.escape(repr(step))}; expected an int, 0 or more: the number"):
        folder_name(step)


def test_the_verify_error_names_all_damaged_files_and_the_remedy(tmp_path: Path) -> None:
    CheckpointStore(tmp_path).save(1, {"a": torch.ones(1)})
    info = open_complete(tmp_path / "step-00000001")
    info.verify()
    (info.folder / "state.json").write_text("true")
    (info.folder / "rank-00000.json").unlink()
    with pytest.raises(StateError) as caught:
        info.verify()
    assert str(info.folder / "state.json") in str(caught.value)
    assert str(info.folder / "rank-00000.json") in str(caught.value)
    assert f"Move {info.folder} away to resume from the checkpoint before it" in str(caught.value)
    assert "tensors-00000.safetensors" not in str(caught.value)


@pytest.mark.parametrize("is_object_store", [False, True])
def test_results_that_are_measured_after_a_save_are_added_to_it(tmp_path: Path, is_object_store: bool) -> None:
    root = f"memory://{uuid.uuid4().hex}" if is_object_store else tmp_path
    store = CheckpointStore(root, retention=Retention(last=1, best=1))
    for step, metric in ((1, 3.0), (2, 1.0), (3, 2.0)):
        store.save(step, {"a": torch.ones(1)}, state={"step": step, "record": None})
        store.amend(step, {"record": [metric]}, metric=metric)
    found = CheckpointStore(root).complete()
    assert [(info.metric, info.state) for info in found] == [
        (2.0, {"step": 3, "record": [2.0]}),
        (1.0, {"step": 2, "record": [1.0]}),
    ]
    found[0].verify()
    store.amend(3, {"step": 4})
    assert (found[0].metric, found[0].state) == (None, {"step": 4, "record": None})
    for step in (1, 4):
        with pytest.raises(UserError, match=rf"got step = {step}, but .* has no complete checkpoint of it; save first"):
            store.amend(step, {})


def test_damaged_results_of_a_later_measurement_are_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, {"a": torch.ones(1)}, state={"a": 1}, metric=1.0)
    store.amend(1, {"a": 2}, metric=2.0)
    path = tmp_path / "step-00000001" / "amendment.json"
    path.write_bytes(path.read_bytes().replace(b"2", b"3"))
    info = open_complete(path.parent)
    info.verify()
    assert (info.metric, info.state) == (1.0, {"a": 1})
    assert "amendment.json: its content does not match its digest" in caplog.text
