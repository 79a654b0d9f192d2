import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from d9d_dist import MeshConfig, UserError, parallelize_hsdp
from d9d_dist.testing import run_ranks
from d9d_state import (
    StateError,
    StateMapper,
    concat,
    convert_model_state,
    drop,
    identity,
    identity_of,
    load_model_state,
    parallel,
    rename,
    save_model_state,
    sequential,
    stack,
    transform,
    unstack,
)
from d9d_state.model_save import check_export
from d9d_state.module_tensors import module_tensors
from d9d_state.safetensors_file import StreamedFile


def _peer_reads(folder: Path) -> dict[str, Tensor]:
    """Read all tensors with the safetensors library, through the index if there is one."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    weight_map = json.loads(index.read_text())["weight_map"]
    return {name: load_file(folder / file)[name] for name, file in weight_map.items()}


def test_the_safetensors_library_reads_an_export_of_one_file(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    save_model_state(model, tmp_path / "export", extra_files={"config.json": {"hidden_size": 2}})
    assert sorted(path.name for path in (tmp_path / "export").iterdir()) == ["config.json", "model.safetensors"]
    loaded = _peer_reads(tmp_path / "export")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
    assert json.loads((tmp_path / "export" / "config.json").read_text()) == {"hidden_size": 2}


def test_files_are_limited_in_size(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    save_model_state(model, tmp_path / "export", max_shard_bytes=24)
    names = sorted(path.name for path in (tmp_path / "export").iterdir())
    assert names == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 48}
    assert list(index["weight_map"]) == sorted(model.state_dict())
    loaded = _peer_reads(tmp_path / "export")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


def test_a_tensor_larger_than_a_file_gets_its_own(tmp_path: Path) -> None:
    save_model_state(nn.Linear(2, 3), tmp_path / "export", max_shard_bytes=1)
    assert (tmp_path / "export" / "model-00002-of-00002.safetensors").exists()


def test_the_inverse_of_the_load_mapper_maps_an_export(tmp_path: Path) -> None:
    model = nn.Linear(2, 4)
    mapper = parallel(
        concat(["q", "k"], "weight", sizes=[3, 1]),
        stack(["b0", "b1", "b2", "b3"], "bias"),
        drop("rotary"),
    )
    save_model_state(model, tmp_path / "export", mapper.inverse(), max_shard_bytes=8)
    assert sorted(_peer_reads(tmp_path / "export")) == ["b0", "b1", "b2", "b3", "k", "q"]
    other = nn.Linear(2, 4)
    load_model_state(other, tmp_path / "export", mapper.restrict(outputs=["weight", "bias"]))
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.bias, model.bias)


def test_dropped_tensors_are_not_written(tmp_path: Path) -> None:
    save_model_state(nn.Linear(2, 3), tmp_path / "export", parallel(rename("weight", "w"), drop("bias")))
    assert list(_peer_reads(tmp_path / "export")) == ["w"]


def test_mapper_that_does_not_match_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        save_model_state(nn.Linear(2, 3), tmp_path / "export", parallel(rename("w", "weight"), rename("bias", "b")))
    assert "consumed, but not in the model: w" in str(caught.value)
    assert "in the model, but not consumed; drop() them if this is intended: weight" in str(caught.value)
    with pytest.raises(ValueError, match=r"unstack\(dim=0\) on bias failed"):
        save_model_state(
            nn.Linear(2, 3), tmp_path / "export", parallel(rename("weight", "w"), unstack("bias", ["a", "b"]))
        )
    assert list(tmp_path.iterdir()) == []


def test_unsupported_dtype_is_refused_before_writing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"safetensors files do not support torch\.complex128"):
        save_model_state(nn.Linear(2, 3, dtype=torch.complex128), tmp_path / "export")
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_export_is_replaced_as_a_whole(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    extra = {"config.json": {"version": 1}}
    save_model_state(nn.Linear(2, 3), tmp_path / "export", max_shard_bytes=1, extra_files=extra)
    save_model_state(model, tmp_path / "export", extra_files={"config.json": {"version": 2}})
    assert sorted(path.name for path in (tmp_path / "export").iterdir()) == ["config.json", "model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export"]
    assert torch.equal(_peer_reads(tmp_path / "export")["weight"], model.weight)


@pytest.mark.parametrize("exists", [True, False])
def test_an_export_into_a_link_writes_the_folder_that_it_points_to(tmp_path: Path, exists: bool) -> None:
    model, folder = nn.Linear(2, 2), tmp_path / "disk" / "folder"
    (tmp_path / "disk").mkdir()
    if exists:
        save_model_state(model, folder)
    for link, target in (("export", "also"), ("also", "disk/folder")):
        (tmp_path / link).symlink_to(target)
    nn.init.ones_(model.weight)
    save_model_state(model, tmp_path / "export", extra_files={"config.json": {}})
    assert (tmp_path / "export").is_symlink()
    assert (_peer_reads(folder)["weight"] == 1).all()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["folder"]
    convert_model_state(folder, tmp_path / "export2")
    nn.init.zeros_(model.weight)
    (tmp_path / "link").symlink_to("export2")
    convert_model_state(folder, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    with pytest.raises(UserError, match="as both source and target"):
        convert_model_state(folder, tmp_path / "export")


def test_folder_with_foreign_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(UserError, match=r"holds model\.safetensors, thesis\.tex, which this export would delete"):
        save_model_state(nn.Linear(2, 3), tmp_path)
    with pytest.raises(UserError, match=r"thesis\.tex is a file; expected a folder"):
        save_model_state(nn.Linear(2, 3), tmp_path / "thesis.tex")
    assert len(list(tmp_path.iterdir())) == 2


def test_the_tokenizer_of_an_earlier_export_is_kept_unless_the_new_one_has_its_own(tmp_path: Path) -> None:
    save_model_state(nn.Linear(2, 3), tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("mine")
    save_model_state(nn.Linear(2, 3), tmp_path, extra_files={"tokenizer.json": {"of": "the new one"}})
    assert (tmp_path / "chat_template.jinja").read_text() == "mine"
    assert "the new one" in (tmp_path / "tokenizer.json").read_text()


@pytest.mark.parametrize(
    ("extra_files", "message"),
    [
        ({}, r"holds thesis\.tex, which this export would delete"),
        ({"a/b": {}}, r"the files beside the weights: got the extra file 'a/b'; expected a plain file name"),
        ({"config.json": {"values": {1}}}, r"the files beside the weights: .*set"),
    ],
)
def test_what_an_export_needs_is_checked_without_writing(
    tmp_path: Path, extra_files: dict[str, Any], message: str
) -> None:
    check_export(tmp_path, extra_files={"config.json": {}})
    check_export(tmp_path / "absent")
    if not extra_files:
        (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match=message):
        check_export(tmp_path, extra_files=extra_files)
    assert len(list(tmp_path.iterdir())) == (not extra_files)


@pytest.mark.parametrize("name", ["", "..", "a/b", "model.safetensors", "model.safetensors.index.json"])
def test_extra_files_must_not_use_weight_file_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="expected a plain file name that is not the name of a weight file"):
        save_model_state(nn.Linear(2, 3), tmp_path / "export", extra_files={name: {}})


def test_failed_export_keeps_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 3)
    save_model_state(model, tmp_path / "export")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StateError, match=r"export could not be written: .*No space left on device"):
            save_model_state(nn.Linear(2, 3), tmp_path / "export")
    assert torch.equal(_peer_reads(tmp_path / "export")["weight"], model.weight)
    save_model_state(nn.Linear(2, 3), tmp_path / "export")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export"]


def _save_sharded(folder: str) -> dict[str, Tensor]:
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 3))
        values = {name: tensor.clone() for name, tensor in module_tensors(model).items()}
        parallelize_hsdp(model, ctx.mesh_for("dense")["dp_cp_shard"], shard_axis="dp_cp_shard")
        mapper = sequential(
            identity_of(model),
            parallel(
                stack(["1.bias"], "one"),
                rename("1.weight", "1.weight"),
                concat(["0.weight"], "0.weight"),
                rename("0.bias", "0.bias"),
            ),
        )
        save_model_state(model, folder, mapper, ctx, max_shard_bytes=40, extra_files={"config.json": {}})
        assert (Path(folder) / "config.json").exists()
        return values


def test_a_sharded_model_is_gathered(tmp_path: Path) -> None:
    values = run_ranks(_save_sharded, str(tmp_path / "export"))[0]
    loaded = _peer_reads(tmp_path / "export")
    assert torch.equal(loaded.pop("one"), values.pop("1.bias")[None])
    assert loaded.keys() == values.keys()
    assert all(torch.equal(loaded[name], values[name]) for name in values)


def _save_without_ctx(folder: str) -> None:
    with MeshConfig(data_parallel_shard=2).build():
        save_model_state(nn.Linear(2, 3), folder)


def test_several_ranks_need_a_context(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="got no ctx on 2 ranks; pass the DistributedContext as ctx"):
        run_ranks(_save_without_ctx, str(tmp_path / "export"))
    assert list(tmp_path.iterdir()) == []


def _fail_on_main(folder: str) -> str:
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        model = nn.Linear(4, 4)
        parallelize_hsdp(model, ctx.mesh_for("dense")["dp_cp_shard"], shard_axis="dp_cp_shard")
        if ctx.is_main_process:
            shutil.rmtree(Path(folder).parent)
            Path(folder).parent.touch()
        ctx.barrier()
        with pytest.raises(StateError) as caught:
            save_model_state(model, folder, ctx=ctx)
        return str(caught.value)


def test_error_of_the_writer_raises_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    messages = run_ranks(_fail_on_main, str(tmp_path / "runs" / "export"))
    assert messages[0] == messages[1]
    assert messages[0].startswith("rank 0: ")
    assert "export could not be written" in messages[0]


@pytest.mark.slow
def test_an_export_that_is_killed_anywhere_is_the_earlier_one_or_the_new_one(
    tmp_path: Path, run_killed: Callable[..., bool]
) -> None:
    old, new = nn.Linear(2, 3), nn.Linear(2, 3)
    folder = tmp_path / "export"
    outcomes: set[str] = set()
    at = 0
    killed = True
    while killed:
        at += 1
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        save_model_state(old, folder, max_shard_bytes=1, extra_files={"config.json": {"of": "old"}})
        killed = run_killed(
            lambda: save_model_state(new, folder, max_shard_bytes=1, extra_files={"config.json": {"of": "new"}}), at=at
        )
        of = json.loads((folder / "config.json").read_text())["of"]
        outcomes.add(of)
        loaded = _peer_reads(folder)
        assert all(
            torch.equal(loaded[name], tensor) for name, tensor in {"old": old, "new": new}[of].state_dict().items()
        )
        save_model_state(new, folder, extra_files={"config.json": {"of": "new"}})
        assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert outcomes == {"old", "new"}
    assert at > 30


class _Stage(nn.Module):
    """Pipeline stage with two of four layers, and the tied embedding on the first and last stage."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(4, 4) for _ in range(4)]
        embedding = nn.Embedding(6, 4)
        self.layers = nn.ModuleDict({str(index): layers[index] for index in range(2 * stage, 2 * stage + 2)})
        self.embedding = embedding


def _save_stages(folder: str, mappers: list[StateMapper | None]) -> list[str | None]:
    with MeshConfig(pipeline_parallel=2, data_parallel_shard=2).build() as ctx:
        stage = _Stage(ctx.coordinate("regular", "pp"))
        mesh = ctx.mesh_for("dense")["dp_cp_shard"]
        parallelize_hsdp(stage, mesh, shard_axis="dp_cp_shard")
        results: list[str | None] = []
        for index, mapper in enumerate(mappers):
            try:
                save_model_state(stage, f"{folder}/{index}", mapper, ctx, max_shard_bytes=100)
                results.append(None)
            except UserError as error:
                results.append(str(error))
        return results


def test_pipeline_stages_write_one_export(tmp_path: Path) -> None:
    layers = [f"layers.{index}.{kind}" for index in range(4) for kind in ("weight", "bias")]
    mapper = parallel(
        *(unstack(name, [f"{name}.{row}" for row in range(4)]) for name in layers), identity("embedding.weight")
    )
    spread = parallel(
        stack([f"layers.{index}.bias" for index in range(4)], "biases"),
        identity("embedding.weight", *(f"layers.{index}.weight" for index in range(4))),
    )
    incomplete = parallel(identity("embedding.weight", "absent"), identity(*layers[2:]))
    results = run_ranks(_save_stages, str(tmp_path), [None, mapper, spread, incomplete], world_size=4)
    assert all(result == results[0] for result in results)
    assert results[0][:2] == [None, None]
    assert results[0][2] is not None
    assert (
        "consumed together, but on different pipeline stages: layers.0.bias, layers.1.bias, layers.2." in results[0][2]
    )
    assert results[0][3] is not None
    assert "consumed, but not in the model: absent\n" in results[0][3]
    assert "but not consumed; drop() them if this is intended: layers.0.weight, layers.0.bias" in results[0][3]
    expected = {**_Stage(0).state_dict(), **_Stage(1).state_dict()}
    plain = _peer_reads(tmp_path / "0")
    assert plain.keys() == expected.keys()
    assert all(torch.equal(plain[name], tensor) for name, tensor in expected.items())
    rows = _peer_reads(tmp_path / "1")
    assert all(torch.equal(torch.stack([rows[f"{name}.{row}"] for row in range(4)]), expected[name]) for name in layers)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    # 4 x (64 + 16) + 96 bytes in files of at most 100, written by all four ranks.
    assert len(list((tmp_path / "0").glob("*.safetensors"))) == 5


def _fail_on_rank_one(folder: str) -> str:
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        model = nn.Linear(4, 4)
        parallelize_hsdp(model, ctx.mesh_for("dense")["dp_cp_shard"], shard_axis="dp_cp_shard")
        save_model_state(model, folder, ctx=ctx, max_shard_bytes=1)
        with pytest.MonkeyPatch.context() as patch:
            if ctx.rank == 1:
                patch.setattr(os, "pwrite", _full_disk)
            with pytest.raises(StateError) as caught:
                save_model_state(nn.Linear(4, 4), folder, ctx=ctx, max_shard_bytes=1)
        save_model_state(model, folder, ctx=ctx, max_shard_bytes=1)
        return str(caught.value)


def _full_disk(*_args: object) -> int:
    raise OSError(28, "No space left on device")


def test_an_error_of_any_writer_raises_on_all_ranks(tmp_path: Path) -> None:
    messages = run_ranks(_fail_on_rank_one, str(tmp_path / "export"))
    assert messages[0] == messages[1]
    assert messages[0].startswith("rank 1: ")
    assert "No space left on device" in messages[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export"]


def test_foreign_partial_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "export.partial").mkdir()
    (tmp_path / "export.partial" / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"export\.partial holds thesis\.tex, which this export would delete"):
        save_model_state(nn.Linear(2, 3), tmp_path / "export")
    assert (tmp_path / "export.partial" / "thesis.tex").exists()


def test_one_file_is_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    original = os.pwrite

    def counted(descriptor: int, data: memoryview, position: int) -> int:
        nonlocal most
        opened = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        most = max(most, sum(path.suffix == ".safetensors" for path in opened))
        return original(descriptor, data, position)

    monkeypatch.setattr(os, "pwrite", counted)
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(10))
    save_model_state(model, tmp_path / "export", max_shard_bytes=1)
    assert len(list((tmp_path / "export").glob("*.safetensors"))) == 20
    assert most == 1


def _fail_in_any_way(folder: str) -> list[str]:
    messages = []
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        model = nn.Linear(4, 4)
        parallelize_hsdp(model, ctx.mesh_for("dense")["dp_cp_shard"], shard_axis="dp_cp_shard")
        failing = parallel(transform(["weight"], ["weight"], _key_error), identity("bias"))
        with pytest.raises(StateError) as caught:
            save_model_state(model, folder, failing, ctx, max_shard_bytes=1)
        messages.append(str(caught.value))
        with pytest.MonkeyPatch.context() as patch:
            if ctx.rank == 1:
                patch.setattr(StreamedFile, "write", _out_of_memory)
            with pytest.raises(StateError) as caught:
                save_model_state(model, folder, None, ctx, max_shard_bytes=1)
        messages.append(str(caught.value))
    return messages


def _key_error(tensor: Tensor) -> list[Tensor]:
    if tensor.is_meta:
        return [tensor]
    raise KeyError("scale")


def _out_of_memory(*_args: object) -> None:
    raise MemoryError("no room")


def test_any_error_on_a_rank_raises_on_every_rank(tmp_path: Path) -> None:
    results = run_ranks(_fail_in_any_way, str(tmp_path / "export"))
    assert results[0] == results[1]
    assert "scale" in results[0][0]
    assert results[0][1] == f"rank 1: {tmp_path / 'export'} could not be written: no room"
