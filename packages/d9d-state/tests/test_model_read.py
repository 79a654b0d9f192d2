import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from d9d_dist import UserError
from d9d_state import cast, drop, keep, parallel, read_model_state, rename, stack, transform


@pytest.fixture
def stored(tmp_path: Path) -> dict[str, Tensor]:
    tensors = {f"w.{index}": torch.randn(3, 4) for index in range(5)} | {"b": torch.randn(4), "i": torch.arange(3)}
    weight_map = {}
    for number in range(3):
        part = dict(list(tensors.items())[number::3])
        save_file(part, tmp_path / f"model-{number}.safetensors")
        weight_map.update(dict.fromkeys(part, f"model-{number}.safetensors"))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


def test_all_tensors_are_read_without_a_mapper(tmp_path: Path, stored: dict[str, Tensor]) -> None:
    given = dict(read_model_state(tmp_path))
    assert given.keys() == stored.keys()
    assert all(torch.equal(given[name], tensor) for name, tensor in stored.items())


def test_outputs_are_read_group_by_group(tmp_path: Path, stored: dict[str, Tensor]) -> None:
    mapper = parallel(
        stack([f"w.{index}" for index in range(5)], "w", dim=1),
        cast("b", dtype=torch.bfloat16),
        drop("i"),
        keep("fresh"),
    )
    given = dict(read_model_state(tmp_path, mapper))
    assert given.keys() == {"w", "b"}
    assert torch.equal(given["w"], torch.stack([stored[f"w.{index}"] for index in range(5)], dim=1))
    assert torch.equal(given["b"], stored["b"].bfloat16())


def test_one_group_is_read_at_a_time(tmp_path: Path, stored: dict[str, Tensor]) -> None:
    computed: list[str] = []

    def recorded(tensor: Tensor) -> list[Tensor]:
        if not tensor.is_meta:
            computed.append("group")
        return [tensor]

    mapper = parallel(*(transform([f"w.{index}"], [f"v.{index}"], recorded) for index in range(5)))
    steps = [len(computed) for _ in read_model_state(tmp_path, mapper, unused="ignore")]
    assert steps == [1, 2, 3, 4, 5]
    assert len(stored) == 7


def test_mismatch_is_refused_before_reading(tmp_path: Path, stored: dict[str, Tensor]) -> None:
    assert "w.0" in stored
    with pytest.raises(UserError) as caught:
        read_model_state(tmp_path, parallel(stack(["w.0", "b"], "w"), rename("absent", "a"), drop("i")))
    assert "missing in the file:\n    absent" in str(caught.value)
    assert 'unused; drop() them, or pass unused="ignore":\n    w.3\n    w.1\n    w.4\n    w.2' in str(caught.value)
    assert "stack(dim=0) on w.0, b failed" in str(caught.value)
    assert "in the model" not in str(caught.value)
