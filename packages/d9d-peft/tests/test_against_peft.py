"""Comparison with Hugging Face `peft`: outputs, gradients, merged weights, and exchange of adapter files."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from d9d_dist.testing import assert_rounds_like, assert_trees_close
from d9d_moe import GroupedLinear
from d9d_peft import DoRA, FullTune, LoRA, PeftMethod, Stack, inject, load_adapters, merge_, save_adapters
from d9d_state import save_model_state, stack

TOKENS = torch.arange(12).view(2, 6)
TARGETS = r"self_attn\.(q|v)_proj|down_proj"
OPTIONS: Any = {"rank": 4, "alpha": 6}
# Methods of d9d, and the equivalent options of peft.
METHODS: dict[str, tuple[PeftMethod, dict[str, Any]]] = {
    "LoRA": (LoRA(TARGETS, **OPTIONS), {}),
    "rsLoRA": (LoRA(TARGETS, rank_stabilized=True, **OPTIONS), {"use_rslora": True}),
    "DoRA": (DoRA(TARGETS, **OPTIONS), {"use_dora": True}),
    "LoRA and norms": (
        Stack(LoRA(TARGETS, **OPTIONS), FullTune(r"model\.norm$|input_layernorm")),
        {"modules_to_save": ["model.norm", "input_layernorm"]},
    ),
}


def qwen(dtype: torch.dtype = torch.float64) -> Any:
    """Return a small Qwen3 with random weights, equal on every call."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=17, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to(dtype)


def ours(method: PeftMethod, dtype: torch.dtype = torch.float64) -> nn.Module:
    model = qwen(dtype)
    inject(method, model)
    return model


def perturb(model: nn.Module) -> None:
    """Change the trained parameters from their initial values."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, mean=0.2, std=0.3)


def logits(model: nn.Module) -> Tensor:
    result: Tensor = model(TOKENS).logits
    return result


def theirs(name: str) -> Any:
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"], **METHODS[name][1])
    model = peft.get_peft_model(qwen(), config)
    assert isinstance(model, peft.PeftModel)
    perturb(model)
    return model


def their_name(name: str) -> str:
    """Return the name in `peft` of a trained parameter."""
    layer, is_adapter, parameter = name.partition(".adapter.")
    if not is_adapter:
        module, _, parameter = name.rpartition(".")
        return f"base_model.model.{module}.modules_to_save.default.{parameter}"
    part = {"lora_a": "lora_A", "lora_b": "lora_B", "magnitude_offset": "lora_magnitude_vector"}[parameter]
    return f"base_model.model.{layer}.{part}.default.weight"


def results(model: nn.Module) -> dict[str, Any]:
    """Return logits, and the gradients of trained parameters by name."""
    output = logits(model)
    output.square().mean().backward()
    gradients = {key: p.grad for key, p in model.named_parameters() if p.requires_grad}
    return {"logits": output.detach(), "gradients": gradients}


@pytest.mark.parametrize("name", METHODS)
def test_outputs_gradients_and_merged_weights_match_peft(tmp_path: Path, name: str) -> None:
    """Compare the results in float64, and the rounding errors of float32 with each other."""
    found: dict[torch.dtype, tuple[dict[str, Any], dict[str, Any]]] = {}
    theirs(name).save_pretrained(str(tmp_path))
    for dtype in (torch.float64, torch.float32):
        reference, model = theirs(name).to(dtype), ours(METHODS[name][0], dtype)
        load_adapters(model, tmp_path)
        got, expected = results(model), results(reference)
        by_their_name = expected["gradients"]
        assert len(got["gradients"]) == len(by_their_name)
        expected["gradients"] = {key: by_their_name[their_name(key)] for key in got["gradients"]}
        merge_(model)
        expected["merged"] = dict(reference.merge_and_unload().state_dict())
        got["merged"] = {key: model.state_dict()[key] for key in expected["merged"]}
        found[dtype] = got, expected
    exact = found[torch.float64][1]
    assert_trees_close(found[torch.float64][0], exact, rtol=1e-10)
    for kind in exact:
        assert_rounds_like(found[torch.float32][0][kind], exact[kind], peer=found[torch.float32][1][kind])


STACKS: dict[str, PeftMethod] = {
    "different ranks": Stack(LoRA("self_attn.(q|v)_proj", **OPTIONS), LoRA("down_proj", rank=2, alpha=9)),
    "different rules": Stack(LoRA("q_proj", rank_stabilized=True, **OPTIONS), LoRA("down_proj", rank=2, alpha=9)),
    **{name: method for name, (method, _) in METHODS.items()},
}


@pytest.mark.parametrize("name", STACKS)
def test_peft_loads_saved_adapters(tmp_path: Path, name: str) -> None:
    import peft

    model = ours(STACKS[name])
    perturb(model)
    save_adapters(model, tmp_path)
    reference = peft.PeftModel.from_pretrained(qwen(), tmp_path)
    torch.testing.assert_close(logits(reference), logits(model), rtol=1e-12, atol=1e-12)


class Nested(nn.Module):
    """Model with a layer whose name is a suffix of other layers' names."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(4, 4)
        self.a, self.b = (nn.ModuleDict({"q": nn.Linear(4, 4)}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b["q"](self.a["q"](self.q(x)))
        return result


@pytest.mark.parametrize("other", [{"rank": 2, "alpha": 9}, {"rank": 3, "alpha": 3}])
def test_layer_whose_name_is_a_suffix_of_others_has_its_own_rank_and_scale(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    import peft

    torch.manual_seed(0)
    base = Nested().double()
    model = copy.deepcopy(base)
    inject(Stack(LoRA(r"\.q", rank=2, alpha=2), LoRA("^q", **other)), model)
    perturb(model)
    save_adapters(model, tmp_path)
    x = torch.randn(5, 4, dtype=torch.float64)
    expected = model(x)
    torch.testing.assert_close(peft.PeftModel.from_pretrained(base, tmp_path)(x), expected, rtol=1e-12, atol=1e-12)
    load_adapters(model, tmp_path)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)


class Experts(nn.Module):
    """Experts as in a checkpoint: one linear layer per expert."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(6, 5, bias=False) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([expert(rows) for expert, rows in zip(self.experts, x.split([3, 0, 4]), strict=True)])


def test_stacked_experts_are_exchanged_with_peft(tmp_path: Path) -> None:
    import peft

    apart, together = Experts().double(), nn.ModuleDict({"experts": GroupedLinear(3, 6, 5).double()})
    mapper = stack([f"experts.{index}.weight" for index in range(3)], "experts.weight")
    together.load_state_dict(mapper.apply(apart.state_dict()))
    inject(LoRA(GroupedLinear, rank=2, alpha=3), together)
    perturb(together)
    save_adapters(together, tmp_path / "ours", mapper)
    x = torch.randn(7, 6, dtype=torch.float64)
    expected = together["experts"](x, torch.tensor([3, 0, 4]))
    reference = peft.PeftModel.from_pretrained(apart, tmp_path / "ours")
    torch.testing.assert_close(reference(x), expected, rtol=1e-12, atol=1e-12)

    reference.save_pretrained(str(tmp_path / "theirs"))
    nn.init.zeros_(together.get_parameter("experts.adapter.lora_b"))
    load_adapters(together, tmp_path / "theirs", mapper)
    torch.testing.assert_close(together["experts"](x, torch.tensor([3, 0, 4])), expected, rtol=1e-12, atol=1e-12)


def test_transformers_loads_the_merged_export(tmp_path: Path) -> None:
    from transformers import Qwen3ForCausalLM

    reference = theirs("DoRA")
    reference.save_pretrained(str(tmp_path / "adapters"))
    model = qwen()
    mapper = inject(METHODS["DoRA"][0], model)
    load_adapters(model, tmp_path / "adapters")
    merge_(model)
    config = json.loads(model.config.to_json_string(use_diff=False))
    save_model_state(model, tmp_path / "export", mapper.inverse(), extra_files={"config.json": config})
    exported = Qwen3ForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float64)
    torch.testing.assert_close(logits(exported), logits(reference), rtol=1e-10, atol=1e-10)
