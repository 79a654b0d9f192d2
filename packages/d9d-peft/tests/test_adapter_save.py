import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from d9d_dist import DistributedContext, MeshConfig, UserError
from d9d_dist.testing import run_ranks
from d9d_moe import GroupedLinear
from d9d_peft import DoRA, FullTune, LoRA, PeftMethod, Stack, inject, load_adapters, save_adapters, stored_tensor_names
from d9d_pipeline import RankStages
from d9d_state import StateError, StateMapper, concat, identity, parallel, rename, sequential, stack, transpose

METHODS: dict[str, PeftMethod] = {
    "LoRA": LoRA("0|1", rank=2, alpha=4.0),
    "DoRA": DoRA("0|1", rank=2, alpha=4.0, rank_stabilized=True),
    "LoRA and norm": Stack(LoRA("0|1", rank=2), FullTune(nn.BatchNorm1d)),
}


def small(method: PeftMethod = METHODS["LoRA"], seed: int = 1) -> nn.Sequential:
    """Return a model with equal base weights on every call, and trained parameters that depend on the seed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4), nn.BatchNorm1d(4))
    inject(method, model)
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    return model


def rounding_of(method: str) -> float:
    """Return the rounding of stored tensors: a file holds a magnitude, norm plus offset; loading subtracts the norm."""
    if method != "DoRA":
        return 0.0
    tensors = dict(small(METHODS[method]).named_parameters())
    offsets = {name: tensor for name, tensor in tensors.items() if name.endswith("magnitude_offset")}
    norms = {name: tensors[f"{name.partition('.')[0]}.weight"].norm(dim=1) for name in offsets}
    largest = max((norms[name] + offset.abs()).max().item() for name, offset in offsets.items())
    return torch.finfo(torch.float32).eps * largest


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


FILES = ["adapter_config.json", "adapter_model.safetensors"]


@pytest.mark.parametrize("method", METHODS)
def test_the_names_of_stored_tensors_are_known_before_a_save(tmp_path: Path, method: str) -> None:
    names = stored_tensor_names(small(METHODS[method]).to("meta"))
    save_adapters(small(METHODS[method]), tmp_path)
    assert names == sorted(load_file(tmp_path / "adapter_model.safetensors"))


@pytest.mark.parametrize("method", METHODS)
def test_round_trip_replaces_an_earlier_save(tmp_path: Path, method: str) -> None:
    other, model = small(METHODS[method], seed=2), small(METHODS[method])
    save_adapters(other, tmp_path)
    save_adapters(model, tmp_path)
    load_adapters(other, tmp_path)
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=rounding_of(method))
    assert files(tmp_path) == FILES


BASE_MAPPER = parallel(
    *(rename(f"model.{name}_proj.{part}", f"{i}.{part}") for i, name in enumerate("qv") for part in ("weight", "bias")),
    identity(*(f"2.{name}" for name in nn.BatchNorm1d(4).state_dict())),
)


def test_saved_adapters_have_the_module_names_of_the_base_checkpoint(tmp_path: Path) -> None:
    model = small(METHODS["LoRA and norm"])
    save_adapters(model, tmp_path, BASE_MAPPER)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert stored.keys() == {
        *(f"base_model.model.model.{x}_proj.lora_{y}.weight" for x in "qv" for y in "AB"),
        *(f"base_model.model.2.{name}" for name in nn.BatchNorm1d(4).state_dict()),
    }
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["model.q_proj", "model.v_proj"]
    assert config["modules_to_save"] == ["2"]
    loaded = small(METHODS["LoRA and norm"], seed=2)
    load_adapters(loaded, tmp_path, BASE_MAPPER)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


class _Projector(nn.Module):
    """A module with a parameter of its own beside a norm and a frozen table."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.norm, self.table = nn.Parameter(torch.ones(5, 5)), nn.LayerNorm(5), nn.Embedding(2, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x @ self.weight) + self.table.weight.sum(0)


class _Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.projector = nn.Linear(5, 5), _Projector()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.projector(self.layer(x))


def test_a_module_that_is_tuned_is_whole_in_the_files_with_those_inside(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    method = Stack(LoRA("layer", rank=2), FullTune(r"projector\.(weight|norm)"))
    model, other = _Projected(), _Projected()
    inject(method, model)
    for each in model.parameters():
        if each.requires_grad:
            nn.init.normal_(each)
    save_adapters(model, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["modules_to_save"] == ["projector"]
    x = torch.ones(2, 5)
    torch.testing.assert_close(peft.PeftModel.from_pretrained(_Projected(), tmp_path)(x), model(x))
    inject(method, other)
    load_adapters(other, tmp_path)
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_an_adapter_inside_of_a_tuned_module_is_an_error(tmp_path: Path) -> None:
    model = nn.ModuleDict({"outer": _Projector()})
    model["outer"].norm = nn.Linear(5, 5)
    inject(Stack(LoRA("norm", rank=2), FullTune(r"outer\.weight")), model)
    with pytest.raises(
        UserError, match=r"outer\.weight is trained in full, and outer\.norm\.adapter\.lora_a is an adapter"
    ):
        save_adapters(model, tmp_path)


def grouped(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(GroupedLinear(3, 5, 5))
    inject(LoRA(GroupedLinear, rank=2), model)
    torch.manual_seed(seed)
    nn.init.normal_(model.get_parameter("0.adapter.lora_b"))
    return model


def test_saved_adapters_of_experts_have_the_expert_names_of_the_base_checkpoint(tmp_path: Path) -> None:
    mapper = stack([f"experts.{expert}.up.weight" for expert in (10, 9, 8)], "0.weight")
    model = grouped()
    save_adapters(model, tmp_path, mapper)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    for index, expert in enumerate((10, 9, 8)):
        for letter, name in (("A", "a"), ("B", "b")):
            expected = model.get_parameter(f"0.adapter.lora_{name}")[index]
            assert torch.equal(stored.pop(f"base_model.model.experts.{expert}.up.lora_{letter}.weight"), expected)
    assert not stored
    loaded = grouped(seed=2)
    load_adapters(loaded, tmp_path, mapper)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_adapters_of_stacked_experts_are_saved_as_target_parameters(tmp_path: Path) -> None:
    mapper = rename("experts.weight", "0.weight")
    model = grouped()
    save_adapters(model, tmp_path, mapper)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert stored["base_model.model.experts.lora_A.weight"].shape == (3 * 2, 5)
    assert stored["base_model.model.experts.lora_B.weight"].shape == (5, 2 * 3)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_parameters"] == ["experts.weight"]
    loaded = grouped(seed=2)
    load_adapters(loaded, tmp_path, mapper)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


def rest(*taken: str) -> StateMapper:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4), nn.BatchNorm1d(4))
    return identity(*(name for name in model.state_dict() if name not in taken))


@pytest.mark.parametrize(
    ("method", "mapper", "message"),
    [
        (
            LoRA("0"),
            parallel(concat(["q.weight", "k.weight"], "0.weight", dim=0), rest("0.weight")),
            r"0\.weight comes from q\.weight, k\.weight of the base checkpoint; expected one tensor of the same shape",
        ),
        (
            LoRA("0"),
            parallel(transpose("0.kernel", "0.weight"), rest("0.weight")),
            r"0\.weight comes from 0\.kernel",
        ),
        (
            LoRA("0"),
            parallel(rename("0.kernel", "0.weight"), rest("0.weight")),
            r"0\.weight is 0\.kernel in the base checkpoint; expected a name that ends in '\.weight'",
        ),
        (
            Stack(LoRA("0"), FullTune("1")),
            parallel(concat(["a.weight", "b.weight"], "1.weight", dim=0), rest("1.weight")),
            r"1\.weight comes from a\.weight, b\.weight of the base checkpoint",
        ),
        (Stack(LoRA("0"), DoRA("1")), rest(), "got adapters of LoRA and of DoRA; expected one kind"),
        (FullTune("1"), rest(), r"got a model without adapters; expected a model after inject\(\) with LoRA or DoRA"),
    ],
)
def test_refuses_tensors_that_files_cannot_hold(
    tmp_path: Path, method: PeftMethod, mapper: StateMapper, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        save_adapters(small(method), tmp_path / "adapters", mapper)
    assert not (tmp_path / "adapters").exists()


def test_refuses_stacked_experts_that_are_transposed(tmp_path: Path) -> None:
    turned = [transpose(f"{expert}.kernel", f"{expert}.weight") for expert in range(3)]
    mapper = stack([f"{expert}.weight" for expert in range(3)], "0.weight")
    with pytest.raises(UserError, match=r"0\.weight comes from 0\.kernel, 1\.kernel, 2\.kernel of the base"):
        save_adapters(grouped(), tmp_path, sequential(parallel(*turned), mapper))


def test_refuses_dora_of_experts_in_one_parameter(tmp_path: Path) -> None:
    model = nn.Sequential(GroupedLinear(3, 5, 5))
    inject(DoRA(GroupedLinear), model)
    with pytest.raises(UserError, match=r"experts\.weight holds all experts of 0\.weight, with DoRA; expected LoRA"):
        save_adapters(model, tmp_path, rename("experts.weight", "0.weight"))


def full_disk(*_args: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_full_disk_keeps_the_earlier_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_adapters(small(), tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(StateError, match=r"writing the adapters failed: .*No space left on device"):
        save_adapters(small(seed=2), tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in files(tmp_path)} == before


def shard_and_save(folder: Path, method: str, ctx: DistributedContext) -> dict[str, Tensor]:
    """Save and load the adapters of a sharded model, and return its tensors."""
    model, loaded = small(METHODS[method]), small(METHODS[method], seed=2)
    for sharded in (model, loaded):
        fully_shard(sharded, mesh=ctx.mesh_for("flat"))
    save_adapters(model, folder, ctx=ctx)
    load_adapters(loaded, folder, ctx=ctx)
    return {name: whole(parameter) for name, parameter in loaded.named_parameters()}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def save_sharded(folder: Path) -> Mapping[str, Mapping[str, Tensor]]:
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        loaded = {method: shard_and_save(folder / method, method, ctx) for method in METHODS}
        with pytest.MonkeyPatch.context() as patch:
            if ctx.is_main_process:
                patch.setattr(os, "fsync", full_disk)
            with pytest.raises(StateError, match=r"writing the adapters failed: .*No space left on device"):
                save_adapters(small(), folder / "full", ctx=ctx)
        return loaded


def test_sharded_adapters_are_gathered_and_all_ranks_raise_on_a_full_disk(tmp_path: Path) -> None:
    expected = {
        method: {name: parameter.detach() for name, parameter in small(METHODS[method]).named_parameters()}
        for method in METHODS
    }
    for result in run_ranks(save_sharded, tmp_path, world_size=2):
        for method, tensors in expected.items():
            torch.testing.assert_close(result[method], tensors, rtol=0, atol=rounding_of(method))


def save_stages(folder: Path) -> dict[str, Tensor]:
    """Save and load from two pipeline ranks, each with one layer."""
    with MeshConfig(pipeline_parallel=2).build() as ctx:
        rank = ctx.coordinate("regular", "pp")
        model, loaded = (stages(small(METHODS["LoRA and norm"], seed), rank) for seed in (1, 2))
        save_adapters(model, folder, BASE_MAPPER, ctx)
        load_adapters(loaded, folder, BASE_MAPPER, ctx)
        with pytest.raises(UserError, match=r"in the folder, but not in the model: .*v_proj|of the base checkpoint"):
            load_adapters(stages(small(), 0), folder, BASE_MAPPER, ctx)
        return dict(loaded.state_dict())


def stages(model: nn.Sequential, index: int) -> RankStages:
    kept = model[:1] if index == 0 else model[1:]
    names = [name for name, _ in model.named_children() if model.get_submodule(name) in list(kept)]
    return RankStages({index: nn.ModuleDict({name: model.get_submodule(name) for name in names})})


def test_stages_are_saved_to_one_file_and_loaded_per_stage(tmp_path: Path) -> None:
    whole_model = small(METHODS["LoRA and norm"])
    first, second = run_ranks(save_stages, tmp_path, world_size=2)
    torch.testing.assert_close({**first, **second}, dict(whole_model.state_dict()), rtol=0, atol=0)
    assert files(tmp_path) == FILES
    loaded = small(METHODS["LoRA and norm"], seed=2)
    load_adapters(loaded, tmp_path, BASE_MAPPER)
    torch.testing.assert_close(loaded.state_dict(), whole_model.state_dict(), rtol=0, atol=0)
