import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from d9d_dist import MeshConfig, UserError, full_tensor, parallelize_hsdp
from d9d_dist.testing import run_ranks
from d9d_state import (
    StateError,
    concat,
    drop,
    identity,
    keep,
    load_model_state,
    model_load,
    parallel,
    rename,
    scope,
    stack,
    transform,
)
from d9d_state.model_load import check_model_state
from d9d_state.module_tensors import module_tensors
from d9d_state.region_reader import RegionReader


class _Model(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 2)
        self.qkv = nn.Linear(2, 5)
        self.head = nn.Linear(2, 5, bias=False)
        self.register_buffer("scale", torch.zeros(2))
        if tied:
            self.head.weight = self.embedding.weight


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.randn_like(tensor) for name, tensor in module_tensors(model).items()}


def _save(folder: Path, tensors: dict[str, Tensor], *, shards: int = 1) -> None:
    """Write files as the safetensors library does: one file, or several and an index."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(sorted(tensors.items())[shard::shards])
        save_file(part, folder / name)
        weight_map.update(dict.fromkeys(part, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _assert_holds(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, tensor in module_tensors(model).items():
        assert torch.equal(tensor.detach(), values[name]), name


@pytest.mark.parametrize("shards", [1, 3])
def test_files_of_the_safetensors_library_are_loaded(tmp_path: Path, shards: int) -> None:
    model = _Model()
    values = _values(model)
    _save(tmp_path, values, shards=shards)
    weight = model.qkv.weight
    load_model_state(model, tmp_path)
    _assert_holds(model, values)
    assert model.qkv.weight is weight
    assert weight.requires_grad


def test_mapper_joins_tensors_of_several_files(tmp_path: Path) -> None:
    model = _Model()
    values = _values(model)
    disk = {
        "m.emb": values["embedding.weight"],
        "m.q": values["qkv.weight"][:3].clone(),
        "m.k": values["qkv.weight"][3:].clone(),
        **{f"m.bias.{index}": value.clone() for index, value in enumerate(values["qkv.bias"])},
        "m.rotary": torch.ones(1),
    }
    _save(tmp_path, disk, shards=3)
    before = {name: tensor.clone() for name, tensor in module_tensors(model).items()}
    mapper = scope(
        "m.",
        "",
        parallel(
            rename("emb", "embedding.weight"),
            concat(["q", "k"], "qkv.weight"),
            stack([f"bias.{index}" for index in range(5)], "qkv.bias"),
            drop("rotary"),
            keep("head.weight", "scale"),
        ),
    )
    load_model_state(model, tmp_path, mapper)
    _assert_holds(model, {**values, "head.weight": before["head.weight"], "scale": before["scale"]})


def test_floating_dtypes_are_converted(tmp_path: Path) -> None:
    model = _Model()
    values = {name: value.bfloat16() for name, value in _values(model).items()}
    _save(tmp_path, values)
    load_model_state(model, tmp_path)
    _assert_holds(model, {name: value.float() for name, value in values.items()})


def test_stage_uses_its_groups_and_opens_only_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = nn.Linear(2, 3)
    values = _values(stage)
    _save(tmp_path, {"a": torch.ones(9), "b": values["bias"], "w": values["weight"]}, shards=3)
    with _recorded_reader(monkeypatch) as readers:
        load_model_state(
            stage,
            tmp_path,
            parallel(rename("a", "elsewhere"), rename("b", "bias"), rename("w", "weight")),
            num_readers=1,
        )
    _assert_holds(stage, values)
    assert [path.name for path in readers[0]._files] == [
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
    ]


@contextmanager
def _recorded_reader(monkeypatch: pytest.MonkeyPatch) -> Generator[list[RegionReader]]:
    readers: list[RegionReader] = []

    def recorded(*args: Any, **kwargs: Any) -> RegionReader:
        readers.append(RegionReader(*args, **kwargs))
        return readers[-1]

    with monkeypatch.context() as patch:
        patch.setattr(model_load, "RegionReader", recorded)
        yield readers


def test_tied_tensor_is_loaded_from_any_of_its_names(tmp_path: Path) -> None:
    for index, (left_out, mapper) in enumerate(
        [
            ("head.weight", None),
            ("head.weight", identity(*module_tensors(_Model()))),
            ("embedding.weight", identity(*module_tensors(_Model()))),
            (None, None),
        ]
    ):
        model = _Model(tied=True)
        values = _values(model)
        values["head.weight"] = values["embedding.weight"]
        folder = tmp_path / str(index)
        folder.mkdir()
        _save(folder, {name: value.clone() for name, value in values.items() if name != left_out})
        load_model_state(model, folder, mapper)
        _assert_holds(model, values)
        assert model.head.weight is model.embedding.weight


def test_mismatch_leaves_the_model_unchanged(tmp_path: Path) -> None:
    model = _Model()
    values = _values(model)
    values["qkv.bias"] = torch.ones(4)
    values["extra"] = torch.ones(1)
    del values["scale"]
    _save(tmp_path, values)
    before = {name: tensor.clone() for name, tensor in module_tensors(model).items()}
    with pytest.raises(UserError) as caught:
        load_model_state(model, tmp_path)
    for line in ("missing in the file:\n    scale", 'unused; drop() them, or pass unused="ignore":\n    extra'):
        assert line in str(caught.value)
    assert "qkv.bias: got [4] float32 from qkv.bias; expected [5] float32" in str(caught.value)
    _assert_holds(model, before)


def test_unused_tensors_can_be_ignored(tmp_path: Path) -> None:
    stage = nn.Linear(2, 3)
    values = _values(stage)
    _save(tmp_path, {**values, "other.stage": torch.ones(1)})
    load_model_state(stage, tmp_path, unused="ignore")
    _assert_holds(stage, values)


def test_meta_model_is_refused(tmp_path: Path) -> None:
    _save(tmp_path, _values(nn.Linear(2, 3)))
    with pytest.raises(ValueError, match="the model is on the meta device; materialize it before loading its state"):
        load_model_state(nn.Linear(2, 3, device="meta"), tmp_path)


def _load_sharded(folder: str, shard: int, replicate: int) -> dict[str, Tensor]:
    with MeshConfig(data_parallel_shard=shard, data_parallel_replicate=replicate).build() as ctx:
        model = _Model()
        parallelize_hsdp(model, ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard"], shard_axis="dp_cp_shard")
        load_model_state(model, folder, parallel(identity("embedding.weight", "scale", "head.weight"), _JOIN))
        return {name: full_tensor(tensor) for name, tensor in module_tensors(model).items()}


_JOIN = parallel(
    concat(["q", "k"], "qkv.weight", sizes=[3, 2]),
    stack([f"bias.{index}" for index in range(5)], "qkv.bias"),
)


@pytest.mark.parametrize(("shard", "replicate"), [(2, 1), (2, 2)])
def test_each_rank_fills_its_shards(tmp_path: Path, shard: int, replicate: int) -> None:
    values = _values(_Model())
    disk = {name: values[name] for name in ("embedding.weight", "scale", "head.weight")}
    disk |= {"q": values["qkv.weight"][:3].clone(), "k": values["qkv.weight"][3:].clone()}
    disk |= {f"bias.{index}": value.clone() for index, value in enumerate(values["qkv.bias"])}
    _save(tmp_path, disk, shards=2)
    for loaded in run_ranks(_load_sharded, str(tmp_path), shard, replicate, world_size=shard * replicate):
        assert loaded.keys() == values.keys()
        assert all(torch.equal(loaded[name], values[name]) for name in values)


def _load_quarters(folder: str) -> list[tuple[bool, float]]:
    results = []
    with (
        MeshConfig(data_parallel_shard=2, data_parallel_replicate=2).build() as ctx,
        pytest.MonkeyPatch.context() as patch,
    ):
        mesh = ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard"]
        for placements in ([Shard(0), Shard(1)], [Shard(1), Shard(2)], [Shard(0), Shard(2)]):
            model = nn.ParameterDict()
            empty = distribute_tensor(torch.zeros(4, 6, 8192), mesh, placements, src_data_rank=None)
            model["experts"] = nn.Parameter(empty)
            with _recorded_reader(patch) as readers:
                load_model_state(model, folder, stack([f"expert.{index}" for index in range(4)], "experts"))
            expected = torch.stack(list(_experts().values()))
            share = readers[0].num_bytes_read / expected.nbytes
            results.append((torch.equal(full_tensor(model["experts"]), expected), share))
    return results


def _experts() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"expert.{index}": torch.randn(6, 8192, generator=generator) for index in range(4)}


def test_a_rank_with_a_quarter_of_a_tensor_reads_a_quarter_of_its_bytes(tmp_path: Path) -> None:
    _save(tmp_path, _experts(), shards=2)
    for results in run_ranks(_load_quarters, str(tmp_path), world_size=4):
        assert results == [(True, 0.25)] * 3


def test_first_error_cancels_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 3)
    _save(tmp_path, _values(model))

    def fail(*_args: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(StateError, match=r"(weight|bias) cannot be read from .*model\.safetensors: Input/output error"):
        load_model_state(model, tmp_path)


@pytest.mark.parametrize("num_readers", [1, 3])
def test_groups_of_tensors_may_be_computed_by_several_threads(tmp_path: Path, num_readers: int) -> None:
    model = nn.ParameterDict({str(index): nn.Parameter(torch.zeros(3)) for index in range(20)})
    values = {str(index): torch.randn(3) for index in range(20)}
    _save(tmp_path, values, shards=4)
    mapper = parallel(*(transform([name], [name], lambda value: [value * 2]) for name in values))
    load_model_state(model, tmp_path, mapper, num_readers=num_readers)
    assert all(torch.equal(model[name], value * 2) for name, value in values.items())
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in model.values())


def test_first_name_of_a_tied_tensor_is_loaded(tmp_path: Path) -> None:
    for index, mapper in enumerate([None, identity(*module_tensors(_Model()))]):
        values = _values(_Model())
        folder = tmp_path / str(index)
        folder.mkdir()
        _save(folder, values)  # embedding and head have different values in the file
        model = _Model(tied=True)
        load_model_state(model, folder, mapper)
        _assert_holds(model, {**values, "head.weight": values["embedding.weight"]})


def test_a_model_on_meta_can_be_checked(tmp_path: Path) -> None:
    values = _values(nn.Linear(2, 3))
    _save(tmp_path, values)
    check_model_state(nn.Linear(2, 3, device="meta"), tmp_path)
    with pytest.raises(UserError, match=r"weight: got \[3, 2\] float32 from weight; expected \[3, 4\] float32"):
        check_model_state(nn.Linear(4, 3, device="meta"), tmp_path)
    _save(tmp_path, _values(_Model()))
    check_model_state(_Model(tied=True), tmp_path)


def test_an_unknown_treatment_of_unused_tensors_is_an_error(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="unused = 'skip'; expected one of error, ignore"):
        load_model_state(model, tmp_path, unused=cast(Any, "skip"))
