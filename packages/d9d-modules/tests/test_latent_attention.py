from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from d9d_dist import (
    ContextSplit,
    MeshConfig,
    UserError,
    materialize,
    parallelize_context,
    parallelize_fsdp,
    parallelize_tensor,
    sync_gradients,
)
from d9d_dist.testing import assert_trees_close, full_gradients, run_ranks
from d9d_modules import AttentionOptions, rotary_tables
from d9d_modules.latent_attention import MultiHeadLatentAttention
from d9d_modules.rope_scaling import YarnScaling

THEIR_NAMES = {
    "q_down_proj": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "q_up_proj": "q_b_proj",
    "kv_down_proj": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "kv_up_proj": "kv_b_proj",
}


class _Norm(nn.Module):
    """Compute in float64; the transformers version rounds to float32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


@pytest.mark.parametrize("q_rank", [None, 10])
@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize(("value_dim", "is_scaled"), [(5, False), (8, True), (13, False)])
def test_outputs_and_gradients_equal_deepseek_v3_of_transformers(
    q_rank: int | None, layout: Any, value_dim: int, is_scaled: bool
) -> None:
    # Here, not above: the ranks of other tests import this file.
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3

    yarn = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 8.0}
    config = DeepseekV3Config(
        hidden_size=12,
        num_attention_heads=3,
        num_key_value_heads=3,
        q_lora_rank=q_rank,
        kv_lora_rank=7,
        qk_nope_head_dim=4,
        qk_rope_head_dim=4,
        v_head_dim=value_dim,
        rope_interleave=layout == "interleaved",
        max_position_embeddings=64,
        rope_parameters={
            "rope_theta": 100.0,
            **({**yarn, "original_max_position_embeddings": 16} if is_scaled else {"rope_type": "default"}),
        },
    )
    config._attn_implementation = "sdpa"  # its eager attention rounds to float32
    theirs = modeling_deepseek_v3.DeepseekV3Attention(config, layer_idx=0)
    if q_rank is not None:
        setattr(theirs, "q_a_layernorm", _Norm(q_rank))  # noqa: B010  (of another type)
    setattr(theirs, "kv_a_layernorm", _Norm(7))  # noqa: B010
    theirs = theirs.double()
    scaling = YarnScaling(factor=4.0, original_max_positions=16, beta_fast=8.0, mscale=1.0, mscale_all_dim=0.7)
    ours = MultiHeadLatentAttention(
        12,
        num_heads=3,
        kv_rank=7,
        q_rank=q_rank,
        head_dim=4,
        rotary_dim=4,
        value_dim=value_dim,
        rotary_layout=layout,
        options=AttentionOptions(scale=8**-0.5 * scaling.temperature(0.7) ** 2) if is_scaled else None,
        init_std=0.4,
    ).double()
    weights = {name: torch.randn_like(weight, requires_grad=True) for name, weight in ours.named_parameters()}
    by_their_names = {
        f"{THEIR_NAMES.get(name.split('.')[0], name.split('.')[0])}.weight": weight for name, weight in weights.items()
    }
    x = torch.randn(2, 9, 12, dtype=torch.float64, requires_grad=True)
    positions = torch.arange(9).unsqueeze(0)
    rotary = rotary_tables(positions, head_dim=4, theta=100.0, scaling=scaling if is_scaled else None)
    mask = torch.zeros(1, 1, 9, 9).double().masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    tables = tuple(torch.cat((table, table), dim=-1) for table in rotary)
    # Both round a frequency, an angle of up to 8 and the factor of YaRN to float32: by 2 eps times the angle.
    rounding = 2 * 2 * torch.finfo(torch.float32).eps * 8
    their_tables = modeling_deepseek_v3.DeepseekV3RotaryEmbedding(config)(x.float(), positions)
    torch.testing.assert_close(tables, their_tables, rtol=0, atol=rounding)
    got = functional_call(ours, weights, (x, rotary))
    expected, _ = functional_call(theirs, by_their_names, (x, tables, mask))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    direction = torch.randn_like(got)
    leaves = [x, *weights.values()]
    gradients = [torch.autograd.grad((out * direction).sum(), leaves) for out in (got, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)


def _layer(**options: Any) -> MultiHeadLatentAttention:
    return MultiHeadLatentAttention(
        12, num_heads=4, kv_rank=6, q_rank=5, head_dim=4, rotary_dim=2, value_dim=3, init_std=0.4, **options
    )


def _train(parallelism: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Return output and gradients over packed documents."""
    x = torch.randn(2, 8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[0] * 3 + [1] * 5, [0] * 7 + [1]])
    with MeshConfig(**{parallelism: -1}).build() as ctx:
        with torch.device("meta"):
            layer = _layer()
            model = nn.ModuleDict({"attention": layer}).double()
        cp = ctx.mesh_for("batch")["cp"]
        parallelize_tensor(model, ctx.mesh_for("dense")["tp"], layer.tensor_plan("attention"))
        parallelize_context(model, cp, method="ring" if parallelism == "context_parallel_shard" else "all_gather")
        if cp.size() > 1:
            parallelize_fsdp(model["attention"], ctx.mesh_for("dense")["dp_cp_shard"])
        materialize(model, device=ctx.device, seed=0)
        split = ContextSplit(cp)
        x, documents, positions = (y.to(ctx.device) for y in split.split((x, documents, torch.arange(8).unsqueeze(0))))
        out = model["attention"](x, rotary_tables(positions, head_dim=2, theta=9.0), document_ids_BL=documents)
        (out * x).sum().backward()
        sync_gradients(model)
        return split.join(out.detach()), full_gradients(model)


@pytest.mark.parametrize("parallelism", ["tensor_parallel", "context_parallel_shard"])
def test_two_ranks_equal_one(parallelism: str) -> None:
    ((expected, gradients),) = run_ranks(_train, parallelism, world_size=1)
    for got, found in run_ranks(_train, parallelism):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        assert_trees_close(found, gradients, rtol=1e-11)


def test_backends_and_options_reach_the_attention_function() -> None:
    rotary = rotary_tables(torch.arange(5).unsqueeze(0), head_dim=2, theta=9.0)
    x = torch.randn(1, 5, 12)
    plain, eager, narrow = _layer(), _layer(backends=["eager"]), _layer(options=AttentionOptions(window=1))
    for other in (eager, narrow):
        other.load_state_dict(plain.state_dict())
    torch.testing.assert_close(eager(x, rotary), plain(x, rotary))
    torch.testing.assert_close(narrow(x, rotary)[:, :1], plain(x, rotary)[:, :1])
    assert not torch.allclose(narrow(x, rotary), plain(x, rotary))


def test_invalid_inputs_raise() -> None:
    with pytest.raises(
        UserError, match=r"got rotary tables of shape \(1, 5, 2\) .* of 1 pairs per position: .* rotary_dim = 2"
    ):
        _layer()(torch.randn(1, 5, 12), rotary_tables(torch.arange(5).unsqueeze(0), head_dim=4, theta=9.0))
    rotary = rotary_tables(torch.arange(5).unsqueeze(0), head_dim=2, theta=9.0)
    with pytest.raises(
        UserError, match=r"got document_ids_BL of shape \(5,\) and dtype torch\.int64; expected integers"
    ):
        _layer()(torch.randn(1, 5, 12), rotary, document_ids_BL=torch.zeros(5, dtype=torch.int64))
