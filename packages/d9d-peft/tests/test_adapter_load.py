import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from d9d_dist import UserError
from d9d_peft import DoRA, LoRA, PeftMethod, Stack, inject, load_adapters, save_adapters, stored_method


def small(method: PeftMethod | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3))
    inject(method or LoRA("0|1", rank=2, alpha=4), model)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.3)
    return model


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
        (lambda folder: (folder / "adapter_config.json").write_text("{"), r"adapter_config\.json is not valid JSON: "),
        (lambda folder: (folder / "adapter_config.json").write_text("[]"), r"has no r and lora_alpha; expected the"),
        (
            lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 20),
            r"adapter_model\.safetensors is not a valid safetensors file: ",
        ),
        (edit_config(use_dora=True), r"adapter_config\.json has .*: use_dora = True \(expected False\)\. Inject the"),
        (edit_config(lora_bias=True), r"adapter_config\.json has .*: lora_bias = True \(expected False\)"),
        (edit_config(bias="all"), r"adapter_config\.json has .*: bias = 'all' \(expected 'none'\)"),
        (
            edit_config(lora_alpha=8),
            r"rank 2 and scale 4 for 0 \(r, .*\); the model's layer has rank 2 and scale 2\. Inject it with rank = 2",
        ),
        (edit_config(alpha_pattern={"1": 2}), r"scale 1 for 1 \(r, .*\); the model's layer has rank 2 and scale 2\."),
        (
            edit_config(use_rslora=True, lora_alpha=2**1.5 + 1),
            r"scale 2\.70711 for 0 .*; .* scale 2\. Inject it with rank_stabilized = True and rank = 2",
        ),
        (
            rename_a_layer,
            r"(?s)do not match.*in the folder, but not in the model: .*2\.lora_A.*not in the folder: .*1\.lora",
        ),
    ],
)
def test_refuses_mismatched_files_without_changes(tmp_path: Path, spoil: Callable[[Path], Any], message: str) -> None:
    save_adapters(small(), tmp_path)
    spoil(tmp_path)
    model = small()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UserError, match=message):
        load_adapters(model, tmp_path)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (LoRA("0|1", rank=3), r"of another shape: .*0\.lora_A\.weight: got \[2, 5\], expected \[3, 5\]"),
        (LoRA("0", rank=2, alpha=4), r"in the folder, but not in the model: base_model\.model\.1\.lora_A\.weight"),
        (DoRA("0|1", rank=2, alpha=4), r"has .*: use_dora = False \(expected True\)"),
    ],
)
def test_refuses_adapters_of_another_method(tmp_path: Path, method: PeftMethod, message: str) -> None:
    save_adapters(small(), tmp_path)
    with pytest.raises(UserError, match=message):
        load_adapters(small(method), tmp_path)


def test_rank_stabilization_may_differ_if_scales_are_equal(tmp_path: Path) -> None:
    save_adapters(small(LoRA("0|1", rank=4, alpha=4, rank_stabilized=True)), tmp_path)
    load_adapters(small(LoRA("0|1", rank=4, alpha=8)), tmp_path)


@pytest.mark.parametrize("method", [LoRA("0", rank=2, alpha=3), Stack(LoRA("0", rank=2), LoRA("2", rank=3))])
def test_a_stored_method_prepares_a_model_for_the_files(method: PeftMethod, tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))

    model, again = build(), build()
    inject(method, model)
    for parameter in model.parameters():
        nn.init.normal_(parameter) if parameter.requires_grad else None
    save_adapters(model, tmp_path, base_model="somewhere")
    inject(stored_method(tmp_path), again)
    load_adapters(again, tmp_path)
    x = torch.randn(5, 4)
    torch.testing.assert_close(again(x), model(x), rtol=0, atol=0)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == "somewhere"
