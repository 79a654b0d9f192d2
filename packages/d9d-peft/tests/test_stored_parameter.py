"""Adapters of a parameter of all experts, compared with `target_parameters` of `peft`."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from d9d_dist import DistributedContext, MeshConfig, StageInfo, UserError
from d9d_dist.testing import assert_rounds_like, assert_trees_close, run_ranks
from d9d_moe import (
    QWEN3_MOE,
    GroupedSwiGLU,
    Qwen3MoeForCausalLM,
    Qwen3MoeParams,
    parallelize_moe,
    sparse_from_hugging_face,
)
from d9d_peft import LoRA, PeftMethod, Stack, inject, load_adapters, merge_, save_adapters
from d9d_state import StateMapper, parallel, rename, sequential, split, transpose

PARAMS = Qwen3MoeParams(
    vocab_size=21, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6, intermediate_size=24,
        tie_word_embeddings=False, initializer_range=0.2,
    num_experts=4, top_k=2, expert_intermediate_size=12,
)  # fmt: skip
FUSED = sparse_from_hugging_face(PARAMS, layout="fused")
TOKENS = torch.arange(16).view(2, 8)
# Options of peft, and the equivalent method of d9d.
CASES: dict[str, tuple[dict[str, Any], PeftMethod]] = {
    "all": (
        {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
        LoRA("experts", rank=3, alpha=6),
    ),
    "stabilized": (
        {"target_modules": [], "target_parameters": ["gate_up_proj", "down_proj"], "use_rslora": True},
        LoRA("experts", rank=3, alpha=6, rank_stabilized=True),
    ),
    "down alone": (
        {"target_modules": [], "target_parameters": ["experts.down_proj"]},
        LoRA("down_proj", rank=3, alpha=6),
    ),
    "gate and up, and attention": (
        {
            "target_modules": ["q_proj"], "target_parameters": ["1.mlp.experts.gate_up_proj"],
            "rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"experts\.gate_up_proj": 9},
        },
        Stack(LoRA(r"1\..*experts\.(gate|up)_proj", rank=3, alpha=9), LoRA("q_proj", rank=2, alpha=6)),
    ),
}  # fmt: skip


def reference(dtype: torch.dtype) -> Any:
    """Return the model of `transformers` with random weights, equal on every call."""
    from transformers import Qwen3MoeConfig
    from transformers import Qwen3MoeForCausalLM as Reference
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm, Qwen3MoeTopKRouter

    torch.manual_seed(0)
    config = Qwen3MoeConfig.from_dict(QWEN3_MOE.write(PARAMS))
    config._experts_implementation = "eager"  # torch's grouped kernel takes no float64
    model = Reference(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.3)
    for module in model.modules() if dtype == torch.float64 else ():
        # The norm and the router of the reference round to float32.
        if isinstance(module, Qwen3MoeRMSNorm):
            module.forward = partial(norm, module)
        elif isinstance(module, Qwen3MoeTopKRouter):
            module.forward = partial(route, module)
    return model.to(dtype)


def norm(module: Any, hidden_states: Tensor) -> Tensor:
    return F.rms_norm(hidden_states, module.weight.shape, module.weight, module.variance_epsilon)


def route(router: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scores = F.linear(hidden_states.flatten(0, -2), router.weight)
    chosen, indices = scores.softmax(-1).topk(router.top_k)
    return scores, chosen / chosen.sum(-1, keepdim=True) if router.norm_topk_prob else chosen, indices


def ours(method: PeftMethod, dtype: torch.dtype) -> tuple[Qwen3MoeForCausalLM, StateMapper]:
    """Return the same model in d9d, with adapters, and the mapper from the reference's tensors."""
    model = Qwen3MoeForCausalLM(PARAMS, StageInfo(0, 1)).to(dtype)
    tensors = dict(reference(dtype).state_dict())
    model.load_state_dict(FUSED.apply_all(tensors))
    return model, sequential(FUSED, inject(method, model))


def perturb(model: nn.Module) -> None:
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, mean=0.1, std=0.3)


def theirs(name: str, dtype: torch.dtype) -> Any:
    import peft

    options: dict[str, Any] = {"r": 3, "lora_alpha": 6, **CASES[name][0]}
    model = peft.get_peft_model(reference(dtype), peft.LoraConfig(**options))
    assert isinstance(model, peft.PeftModel)
    perturb(model)
    return model


def logits(model: nn.Module) -> Tensor:
    output = model.eval()(TOKENS)
    result: Tensor = output.logits if hasattr(output, "logits") else output
    return result


def load_and_merge(folder: Path, name: str, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return logits and merged weights of d9d with the adapters of peft, and those of peft."""
    expected = theirs(name, dtype)
    expected.save_pretrained(str(folder))
    model, mapper = ours(CASES[name][1], dtype)
    before = logits(model)
    load_adapters(model, folder, FUSED)
    got, wanted = {"logits": logits(model).detach()}, {"logits": logits(expected).detach()}
    assert (got["logits"] - before).abs().max() > 0.01
    merge_(model)
    exported, merged = mapper.inverse().apply_all(model.state_dict()), expected.merge_and_unload().state_dict()
    return {**got, "merged": exported}, {**wanted, "merged": {key: merged[key] for key in exported}}


@pytest.mark.parametrize("name", CASES)
def test_adapters_of_peft_load_and_merge_as_in_peft(tmp_path: Path, name: str) -> None:
    """Compare the results in float64, and the rounding errors of float32 with each other."""
    double, exact = load_and_merge(tmp_path, name, torch.float64)
    assert_trees_close(double, exact, rtol=1e-10)
    single, peer = load_and_merge(tmp_path, name, torch.float32)
    for kind in exact:
        assert_rounds_like(single[kind], exact[kind], peer=peer[kind])


@pytest.mark.parametrize("name", CASES)
def test_peft_and_d9d_load_saved_adapters(tmp_path: Path, name: str) -> None:
    import peft

    model, _ = ours(CASES[name][1], torch.float64)
    perturb(model)
    save_adapters(model, tmp_path, FUSED)
    loaded = peft.PeftModel.from_pretrained(reference(torch.float64), tmp_path)
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-10, atol=1e-10)
    again, _ = ours(CASES[name][1], torch.float64)
    load_adapters(again, tmp_path, FUSED)
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_shared_factor_a_is_refused_for_layers_of_half_its_rank(tmp_path: Path) -> None:
    import peft

    theirs("all", torch.float32).save_pretrained(str(tmp_path))
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text())
    # The layers of peft have rank 3; rank 6 is the sum of the ranks of gate and up.
    model, _ = ours(LoRA("experts", rank=6, alpha=12), torch.float32)
    perturb(model)
    with pytest.raises(
        UserError, match=r"of another shape: .*experts\.lora_A\.weight: got \[12, 12\], expected \[24, "
    ):
        load_adapters(model, tmp_path, FUSED)
    wide = peft.LoraConfig(r=6, lora_alpha=12, target_modules=[], target_parameters=config["target_parameters"])
    other = peft.get_peft_model(reference(torch.float32), wide)
    assert isinstance(other, peft.PeftModel)
    perturb(other)
    other.save_pretrained(str(tmp_path / "wide"))
    narrow = Stack(LoRA(r"(gate|up)_proj", rank=3, alpha=6), LoRA(r"experts\.down_proj", rank=6, alpha=12))
    model, _ = ours(narrow, torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UserError, match=r"gate_up_proj of rank 6 shares its A .*Inject the layers with rank = 6\."):
        load_adapters(model, tmp_path / "wide", FUSED)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


PER_EXPERT = sparse_from_hugging_face(PARAMS)


def test_refuses_target_parameters_if_the_mapper_has_one_weight_per_expert(tmp_path: Path) -> None:
    theirs("all", torch.float32).save_pretrained(str(tmp_path))
    model, _ = ours(CASES["all"][1], torch.float32)
    with pytest.raises(UserError, match=r"target_parameters = .*; the model has adapters of layers\..*'fused'"):
        load_adapters(model, tmp_path, PER_EXPERT)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            LoRA("gate_proj"),
            r"gate_proj\.weight and \S+up_proj\.weight come from the same tensors of the base checkpoint",
        ),
        (
            Stack(LoRA("gate_proj", rank=2, alpha=4), LoRA("up_proj", rank=4, alpha=4)),
            r"gate_up_proj holds layers whose adapters have the scales 1, 2; expected equal scales\. Inject these",
        ),
    ],
)
def test_adapters_that_do_not_fit_into_one_parameter_are_refused(
    tmp_path: Path, method: PeftMethod, message: str
) -> None:
    model, _ = ours(method, torch.float32)
    with pytest.raises(UserError, match=message):
        save_adapters(model, tmp_path / "adapters", FUSED)
    assert not (tmp_path / "adapters").exists()


def swiglu() -> nn.ModuleDict:
    torch.manual_seed(0)
    model = nn.ModuleDict({"experts": GroupedSwiGLU(3, 6, 6)})
    inject(LoRA("experts", rank=2), model)
    return model


NAMES = [f"experts.{name}_proj.weight" for name in ("gate", "up", "down")]


@pytest.mark.parametrize(
    ("mapper", "message"),
    [
        (
            parallel(rename("experts.a", NAMES[0]), rename("experts.b", NAMES[1]), rename("down", NAMES[2])),
            r"experts\.a and experts\.b have adapters of equal shapes, .*cannot distinguish; .* Adapt one of them",
        ),
        (
            parallel(
                sequential(transpose("experts.w", "w", dim0=1, dim1=2), split("w", NAMES[:2], [6, 6], dim=1)),
                rename("down", NAMES[2]),
            ),
            r"experts\.gate_proj\.weight comes from experts\.w of the base checkpoint; expected one tensor of the same",
        ),
    ],
)
def test_refuses_parameters_that_files_of_peft_cannot_hold(tmp_path: Path, mapper: StateMapper, message: str) -> None:
    with pytest.raises(UserError, match=message):
        save_adapters(swiglu(), tmp_path / "adapters", mapper)


def test_row_order_may_differ_from_layer_order(tmp_path: Path) -> None:
    mapper = parallel(split("experts.up_gate", [NAMES[1], NAMES[0]], [6, 6], dim=1), rename("down", NAMES[2]))
    model, again = swiglu(), swiglu()
    perturb(model)
    save_adapters(model, tmp_path, mapper)
    b = load_file(tmp_path / "adapter_model.safetensors")["base_model.model.experts.lora_B.weight"]
    up = b.view(12, 4, 3).permute(2, 0, 1)[:, :6, :2]
    assert torch.equal(up, model.get_parameter("experts.up_proj.adapter.lora_b"))
    load_adapters(again, tmp_path, mapper)
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)


def save_in_layout(folder: Path, mesh: dict[str, int]) -> None:
    with MeshConfig(**mesh).build() as ctx:
        model, again = laid_out(ctx), laid_out(ctx)
        perturb_whole(model)
        save_adapters(model, folder, FUSED, ctx)
        load_adapters(again, folder, FUSED, ctx)
        for (name, got), expected in zip(again.named_parameters(), model.parameters(), strict=True):
            if got.requires_grad:
                torch.testing.assert_close(local(got), local(expected), rtol=0, atol=0, msg=name)


def laid_out(ctx: DistributedContext) -> nn.Module:
    model, _ = ours(CASES["all"][1], torch.float32)
    perturb(model)
    parallelize_moe(model, ctx)
    return model


def perturb_whole(model: nn.Module) -> None:
    """Change the trained parameters to values that do not depend on the layout."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(2)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize(
    "mesh", [{"data_parallel_shard": 2, "expert_parallel": 2}, {"tensor_parallel": 2, "expert_parallel": 2}]
)
def test_adapters_saved_on_several_ranks_equal_one_process_bitwise(tmp_path: Path, mesh: dict[str, int]) -> None:
    model, _ = ours(CASES["all"][1], torch.float32)
    perturb(model)
    perturb_whole(model)
    save_adapters(model, tmp_path / "one", FUSED)
    run_ranks(save_in_layout, tmp_path / "several", mesh, world_size=2)
    name = "adapter_model.safetensors"
    assert (tmp_path / "several" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
