"""The proof against Hugging Face `peft`: the same numbers, and adapters and merged weights that go both ways."""

import json
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from d9d_peft import LoRA, PeftMethod, Stack, inject, load_adapters, merge_, save_adapters
from d9d_state import save_model_state

TOKENS = torch.arange(12).view(2, 6)
TARGETS = r"self_attn\.(q|v)_proj|down_proj"
PEFT_CONFIG = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"])


def qwen(dtype: torch.dtype = torch.float64) -> Qwen3ForCausalLM:
    """A tiny Qwen3 with random weights, the same on every call."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=17, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to(dtype)


def ours(method: PeftMethod | None = None, dtype: torch.dtype = torch.float64) -> nn.Module:
    model = qwen(dtype)
    inject(method or LoRA(TARGETS, rank=4, alpha=6), model)
    return model


def perturb(model: nn.Module) -> None:
    """Take the adapters away from their start, where B is zero."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.3)


def logits(model: nn.Module) -> Tensor:
    result: Tensor = model(TOKENS).logits
    return result


@pytest.fixture
def theirs() -> peft.PeftModel:
    model = peft.get_peft_model(qwen(), PEFT_CONFIG)
    assert isinstance(model, peft.PeftModel)
    perturb(model)
    return model


TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_same_outputs_gradients_and_merged_weights_as_peft(
    theirs: peft.PeftModel, tmp_path: Path, dtype: torch.dtype
) -> None:
    theirs.save_pretrained(str(tmp_path))
    theirs = theirs.to(dtype)
    model = ours(dtype=dtype)
    load_adapters(model, tmp_path)
    assert_close = partial(torch.testing.assert_close, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert_close(logits(model), logits(theirs))

    logits(model).square().sum().backward()
    logits(theirs).square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(gradients) == 2 * 2 * 3
    for name, gradient in gradients.items():
        module, matrix = name.removesuffix(".lora_a").removesuffix(".lora_b"), name[-1].upper()
        expected = theirs.get_parameter(f"base_model.model.{module}.lora_{matrix}.default.weight").grad
        assert_close(gradient, expected)

    merge_(model)
    merged = theirs.merge_and_unload().state_dict()
    for name, tensor in merged.items():
        path = name.removesuffix(".weight")
        ours_name = f"{path}.base.weight" if f"{path}.base.weight" in model.state_dict() else name
        assert_close(model.state_dict()[ours_name], tensor)


def test_peft_loads_what_we_save(tmp_path: Path) -> None:
    model = ours(Stack(LoRA("self_attn.(q|v)_proj", rank=4, alpha=6), LoRA("down_proj", rank=2, alpha=9)))
    perturb(model)
    save_adapters(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(qwen(), tmp_path)
    torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-12, atol=1e-12)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


def test_transformers_loads_the_merged_export(theirs: peft.PeftModel, tmp_path: Path) -> None:
    theirs.save_pretrained(str(tmp_path / "adapters"))
    model = qwen()
    mapper = inject(LoRA(TARGETS, rank=4, alpha=6), model)
    load_adapters(model, tmp_path / "adapters")
    merge_(model)
    config = json.loads(model.config.to_json_string(use_diff=False))
    save_model_state(model, tmp_path / "export", mapper.inverse(), extra_files={"config.json": config})
    exported = Qwen3ForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float64)
    torch.testing.assert_close(logits(exported), logits(theirs), rtol=1e-10, atol=1e-10)
