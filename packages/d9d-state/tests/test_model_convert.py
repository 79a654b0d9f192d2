import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from d9d_dist import MeshConfig, UserError
from d9d_dist.testing import run_ranks
from d9d_state import (
    ModelFolder,
    StateError,
    StateMapper,
    convert_model_state,
    parallel,
    rename,
    stack,
    transform,
)

_NUM_LAYERS = 6


def _stored() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"h.{layer}.expert.{expert}": torch.randn(2, 4, generator=generator)
        for layer in range(_NUM_LAYERS)
        for expert in range(3)
    }
    return {**tensors, "norm": torch.randn(5, generator=generator)}


def _mapper() -> StateMapper:
    layers = [
        stack([f"h.{layer}.expert.{expert}" for expert in range(3)], f"layers.{layer}") for layer in range(_NUM_LAYERS)
    ]
    return parallel(*layers, rename("norm", "final.norm"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    save_file(_stored(), folder / "model.safetensors")
    return folder


def _read(folder: Path) -> dict[str, Tensor]:
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return {name: load_file(folder / file)[name] for name, file in weight_map.items()}


def _expected() -> dict[str, Tensor]:
    stored = _stored()
    layers = {
        f"layers.{layer}": torch.stack([stored[f"h.{layer}.expert.{expert}"] for expert in range(3)])
        for layer in range(_NUM_LAYERS)
    }
    return {**layers, "final.norm": stored["norm"]}


def _assert_converted(folder: Path) -> None:
    loaded, expected = _read(folder), _expected()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_converting_back_restores_the_files(source: Path, tmp_path: Path) -> None:
    convert_model_state(
        source, tmp_path / "there", _mapper(), max_shard_bytes=200, extra_files={"config.json": {"a": 1}}
    )
    _assert_converted(tmp_path / "there")
    assert json.loads((tmp_path / "there" / "config.json").read_text()) == {"a": 1}
    convert_model_state(tmp_path / "there", tmp_path / "back", _mapper().inverse())
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == _stored().keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in _stored().items())


def test_without_a_mapper_only_the_files_change(source: Path, tmp_path: Path) -> None:
    convert_model_state(source, tmp_path / "cut", max_shard_bytes=100)
    assert ModelFolder.open(tmp_path / "cut").tensors == ModelFolder.open(source).tensors
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) == 7


def _explode(_tensor: Tensor) -> list[Tensor]:
    if _tensor.is_meta:
        return [_tensor]
    raise RuntimeError("boom")


def _convert_on_ranks(folder: str) -> list[str]:
    place = Path(folder)
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        convert_model_state(place / "source", place / "target", _mapper(), ctx)
        messages = []
        failing = parallel(_mapper().restrict(outputs=["layers.0"]), transform(["norm"], ["n"], _explode))
        for mapper, target, error in (
            (parallel(_mapper(), rename("absent", "a")), "target", UserError),
            (_mapper(), "source", UserError),
            (failing, "target", StateError),
        ):
            with pytest.raises(error) as caught:
                convert_model_state(place / "source", place / target, mapper, ctx, unused="ignore")
            messages.append(str(caught.value))
        with pytest.MonkeyPatch.context() as patch:
            if ctx.rank == 2:
                patch.setattr(os, "fsync", _full_disk)
            with pytest.raises(StateError) as caught:
                convert_model_state(place / "source", place / "target", _mapper(), ctx)
            messages.append(str(caught.value))
        return messages


def _full_disk(*_args: object) -> None:
    raise OSError(28, "No space left on device")


def test_ranks_share_the_work_and_fail_together(source: Path, tmp_path: Path) -> None:
    results = run_ranks(_convert_on_ranks, str(tmp_path), world_size=4)
    assert all(messages == results[0] for messages in results)
    missing, same, exploded, full = results[0]
    assert "missing in the file:\n    absent" in missing
    assert "as both source and target; expected a different target folder" in same
    assert "boom" in exploded
    assert "rank 2: " in full
    assert "No space left on device" in full
    _assert_converted(tmp_path / "target")
    assert len(list((tmp_path / "target").glob("*.safetensors"))) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]
    assert source.exists()
