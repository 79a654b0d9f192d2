import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from d9d_dist import MeshConfig, UserError
from d9d_dist.testing import run_ranks
from d9d_peft import LoRA, inject, load_adapters, save_adapters
from d9d_state import concat, identity, parallel, rename


def perturb(model: nn.Module) -> None:
    """Take the adapters away from their start, where B is zero."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.3)


def small(rank: int = 2, alpha: float = 4.0) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3))
    inject(LoRA("0|1", rank=rank, alpha=alpha), model)
    perturb(model)
    return model


def test_come_back_as_they_were_over_an_earlier_save(tmp_path: Path) -> None:
    fresh = small()
    nn.init.zeros_(fresh.get_parameter("1.lora_b"))
    save_adapters(fresh, tmp_path)
    model = small()
    save_adapters(model, tmp_path)
    load_adapters(fresh, tmp_path)
    torch.testing.assert_close(fresh.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


BASE_MAPPER = parallel(
    *(rename(f"model.{name}_proj.{part}", f"{i}.{part}") for i, name in enumerate("qv") for part in ("weight", "bias"))
)


def test_adapters_are_named_as_in_the_base_checkpoint(tmp_path: Path) -> None:
    model = small()
    save_adapters(model, tmp_path, BASE_MAPPER)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert stored.keys() == {f"base_model.model.model.{x}_proj.lora_{y}.weight" for x in "qv" for y in "AB"}
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == [
        "model.q_proj", "model.v_proj",
    ]  # fmt: skip
    loaded = small()
    nn.init.zeros_(loaded.get_parameter("0.lora_b"))
    load_adapters(loaded, tmp_path, BASE_MAPPER)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_refuses_an_adapter_of_a_joined_weight(tmp_path: Path) -> None:
    mapper = parallel(concat(["q.weight", "k.weight"], "0.weight", dim=0), identity("0.bias", "1.weight", "1.bias"))
    message = r"0\.weight comes from q\.weight, k\.weight of the base checkpoint; expected one tensor named"
    with pytest.raises(UserError, match=message):
        save_adapters(small(), tmp_path / "adapters", mapper)
    assert not (tmp_path / "adapters").exists()


def test_refuses_a_model_without_adapters(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"got a model without LoRA layers; expected one that inject\(\) was called on"):
        save_adapters(nn.Linear(2, 2), tmp_path)


def edit_config(**values: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return edit


def rename_a_layer(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = {name.replace("model.1.", "model.2."): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), r"adapter_config\.json does not exist; expected a"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), r"adapter_model\.safetensors does not exist"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), r"adapter_config\.json is no JSON: "),
        (edit_config(use_dora=True), r"says .*'use_dora': True.*: only plain LoRA can be loaded"),
        (
            edit_config(lora_alpha=8),
            r"scale 0 by 4; the model's layer by 2\. Inject LoRA with rank = 2 and alpha = 8\.",
        ),
        (edit_config(alpha_pattern={"1": 2}), r"scale 1 by 1; the model's layer by 2\."),
        (edit_config(use_rslora=True, lora_alpha=2**1.5 + 1), r"scale 0 by 2\.70711; the model's layer by 2\."),
        (
            rename_a_layer,
            r"(?s)do not fit.*in the folder, but not in the model: .*2\.lora_A.*not in the folder: .*1\.lora",
        ),
    ],
)
def test_refuses_adapters_that_do_not_fit_and_changes_nothing(
    tmp_path: Path, spoil: Callable[[Path], Any], message: str
) -> None:
    save_adapters(small(), tmp_path)
    spoil(tmp_path)
    model = small()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UserError, match=message):
        load_adapters(model, tmp_path)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_refuses_adapters_of_another_rank(tmp_path: Path) -> None:
    save_adapters(small(rank=3), tmp_path)
    with pytest.raises(UserError, match=r"of another shape: .*0\.lora_A\.weight: got \[3, 5\], expected \[2, 5\]"):
        load_adapters(small(), tmp_path)


def test_takes_rank_stabilised_scaling(tmp_path: Path) -> None:
    save_adapters(small(rank=4, alpha=4.0), tmp_path)
    edit_config(use_rslora=True)(tmp_path)
    load_adapters(small(rank=4, alpha=8.0), tmp_path)


def save_and_load_sharded(folder: Path) -> list[Tensor]:
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        model, loaded = small(), small()
        for sharded in (model, loaded):
            fully_shard(sharded, mesh=ctx.mesh_for("flat"))
        for name, parameter in loaded.named_parameters():
            if "lora_" in name:
                nn.init.zeros_(parameter)
        save_adapters(model, folder, ctx=ctx)
        ctx.wait_world()
        load_adapters(loaded, folder)
        return [whole(parameter) for parameter in loaded.parameters()]


def whole(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor().detach()


def test_sharded_adapters_are_saved_whole_and_loaded_by_part(tmp_path: Path) -> None:
    expected = [parameter.detach() for parameter in small().parameters()]
    for result in run_ranks(save_and_load_sharded, tmp_path, world_size=2):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
