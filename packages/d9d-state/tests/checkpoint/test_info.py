import re
from pathlib import Path
from typing import Any

import pytest
import torch

from d9d_dist import UserError
from d9d_state import CheckpointStore, StateError
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
