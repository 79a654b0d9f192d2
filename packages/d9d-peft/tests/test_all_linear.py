from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from d9d_dist import MeshConfig, parallelize_hsdp
from d9d_dist.testing import run_ranks
from d9d_peft import DoRA, LoRA, inject, linear_layers, load_adapters, merge_, save_adapters

IDS = torch.tensor([[3, 0, 5], [1, 5, 6]])


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=17, n_embd=16, n_layer=1, n_head=2, n_positions=8)
    return GPT2LMHeadModel(config).double().eval()


def _draw(model: nn.Module) -> None:
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)


def test_linear_layers_are_those_of_peft_and_the_head() -> None:
    import peft

    theirs = peft.get_peft_model(gpt2(), peft.LoraConfig(target_modules="all-linear"))
    names = {name.partition(".lora_A")[0] for name, _ in theirs.named_parameters() if "lora_A" in name}
    assert {f"base_model.model.{name}" for name in linear_layers(gpt2())} == names | {"base_model.model.lm_head"}
    assert "base_model.model.transformer.h.0.attn.c_attn" in names


class _Same(nn.Linear):
    """Linear layer that computes its product in another way, as that of Falcon."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as in torch
        hidden, bias = input @ self.weight.T, self._parameters["bias"]
        return hidden if bias is None else hidden + bias


class _Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as in torch
        return 2 * super().forward(input)


class _Router(nn.Linear):
    def forward(self, input: Tensor) -> Any:  # noqa: A002 - as in torch
        return super().forward(input).topk(1)


class _Blocks(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as in torch
        return torch.einsum("bgi,goi->bgo", input.view(-1, 3, 2), self.weight.view(3, 1, 2)).flatten(1)


class _Transposed(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as in torch
        return input @ self.weight


class _Positive(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as in torch
        return nn.functional.linear(input.relu(), self.weight.abs())


@pytest.mark.parametrize("method", [LoRA, DoRA])
def test_layers_that_are_no_product_with_their_weight_have_no_adapter(method: Any) -> None:
    layers = [nn.Linear(6, 3), _Same(6, 3), _Doubled(6, 3), _Router(6, 3), _Blocks(2, 3, bias=False)]
    layers += [_Transposed(3, 3), _Positive(3, 3)]
    model = nn.Sequential(*layers)
    assert linear_layers(model) == ["0", "1"]
    inject(method(nn.Linear, rank=2), model)
    assert [hasattr(each, "adapter") for each in layers] == [True, True, *[False] * 5]


@pytest.mark.parametrize("method", [LoRA, DoRA])
def test_adapters_of_transposed_layers_are_exchanged_with_peft_and_merged(method: Any, tmp_path: Path) -> None:
    import peft

    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["c_attn", "c_fc"], use_dora=method is DoRA)
    theirs = peft.get_peft_model(gpt2(), config)
    _draw(theirs)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    expected = theirs.eval()(IDS).logits
    ours = gpt2()
    inject(method("c_attn|c_fc", rank=2, alpha=6), ours)
    load_adapters(ours, tmp_path / "theirs")
    torch.testing.assert_close(ours(IDS).logits, expected, rtol=1e-6, atol=1e-7)
    save_adapters(ours, tmp_path / "ours")
    back = peft.PeftModel.from_pretrained(gpt2(), str(tmp_path / "ours")).eval()
    torch.testing.assert_close(back(IDS).logits, expected, rtol=1e-6, atol=1e-7)
    merge_(ours)
    torch.testing.assert_close(ours(IDS).logits, expected, rtol=1e-6, atol=1e-7)


def _merge_sharded(method: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        model = gpt2()
        inject(method("c_attn|c_fc", rank=2, alpha=6), model)
        _draw(model)
        dense = ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard", "cp_replicate"]
        parallelize_hsdp(model, dense, shard_axis="dp_cp_shard")
        before = model(IDS).logits.detach()
        merge_(model, ctx)
        return before, model(IDS).logits.detach()


@pytest.mark.parametrize("method", [LoRA, DoRA])
def test_adapters_of_transposed_layers_are_merged_into_shards(method: Any) -> None:
    for before, after in run_ranks(_merge_sharded, method, world_size=2):
        torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-7)
