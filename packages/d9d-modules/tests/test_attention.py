import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from d9d_dist import (
    ContextMethod,
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
from d9d_modules import (
    AttentionOptions,
    GroupedQueryAttention,
    RMSNorm,
    apply_rotary,
    checkpoint_activations,
    rotary_tables,
)
from d9d_modules.attention_backends.choice import ChosenAttention
from d9d_modules.rope import RotaryLayout


def _by_hand(attention: GroupedQueryAttention, x: Tensor, position_ids: Tensor, *, theta: float) -> Tensor:
    """Compute attention for one query head and one position at a time."""
    head_dim = attention.head_dim
    tables = rotary_tables(position_ids, head_dim=head_dim, theta=theta)
    q, k, v = (
        (x @ projection.weight.T).unflatten(-1, (-1, head_dim))
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    if attention.q_norm is not None and attention.k_norm is not None:
        q, k = attention.q_norm(q), attention.k_norm(k)
    q, k = (apply_rotary(x, tables, layout=attention.rotary_layout) for x in (q, k))
    group = q.shape[2] // k.shape[2]
    out = torch.zeros_like(q)
    for row in range(x.shape[0]):
        for head in range(q.shape[2]):
            for now in range(x.shape[1]):
                scores = k[row, : now + 1, head // group] @ q[row, now, head] / math.sqrt(head_dim)
                out[row, now, head] = scores.softmax(0) @ v[row, : now + 1, head // group]
    return out.flatten(-2) @ attention.o_proj.weight.T


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("qk_norm_eps", [None, 1e-6])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_matches_a_loop_over_positions(
    num_heads: int, num_kv_heads: int, qk_norm_eps: float | None, layout: RotaryLayout
) -> None:
    attention = GroupedQueryAttention(
        12,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        qk_norm_eps=qk_norm_eps,
        rotary_layout=layout,
        init_std=0.5,
    ).double()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    position_ids = torch.tensor([[0, 1, 2, 3, 4], [3, 4, 5, 6, 7]])
    attended = attention(x, rotary_tables(position_ids, head_dim=8, theta=100.0))
    torch.testing.assert_close(attended, _by_hand(attention, x, position_ids, theta=100.0), rtol=1e-10, atol=1e-10)


def test_qk_norm_is_over_each_head_and_optional() -> None:
    sizes: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    with_norm = GroupedQueryAttention(12, **sizes, qk_norm_eps=1e-5)
    assert isinstance(with_norm.q_norm, RMSNorm)
    assert isinstance(with_norm.k_norm, RMSNorm)
    assert with_norm.q_norm.weight.shape == with_norm.k_norm.weight.shape == (8,)
    assert with_norm.q_norm.eps == with_norm.k_norm.eps == 1e-5
    without = GroupedQueryAttention(12, **sizes)
    assert [name for name, _ in without.named_parameters()] == [f"{p}_proj.weight" for p in "qkvo"]


def test_indivisible_numbers_of_heads_raise() -> None:
    with pytest.raises(UserError, match=r"num_heads = 6, num_kv_heads = 4; .* use a num_kv_heads that divides"):
        GroupedQueryAttention(12, num_heads=6, num_kv_heads=4, head_dim=8)


def _mask(length: int, window: int | None) -> Tensor:
    """Return an additive attention mask: 0 for visible positions."""
    positions = torch.arange(length)
    distances = positions.unsqueeze(-1) - positions
    seen = (distances >= 0) & (distances < (window or length))
    return torch.zeros(1, 1, length, length, dtype=torch.float64).masked_fill(~seen, -torch.inf)


def _assert_same(
    ours: GroupedQueryAttention,
    theirs: Callable[..., tuple[Tensor, Any]],
    pairs: dict[str, Tensor],
    *,
    window: int | None,
    copies: int,
) -> None:
    """Compare outputs and input gradients; `pairs` are the shared weights by their names in d9d.

    The rotary tables of `theirs` contain each angle `copies` times.
    """
    for name, weight in pairs.items():
        ours.get_parameter(name).data = weight.detach().clone()
    x = torch.randn(2, 9, 12, dtype=torch.float64, requires_grad=True)
    tables = rotary_tables(torch.arange(9).unsqueeze(0), head_dim=8, rotary_dim=ours.rotary_dim, theta=100.0)
    got = ours(x, tables)
    expected, _ = theirs(
        x, (torch.cat((tables.cos,) * copies, dim=-1), torch.cat((tables.sin,) * copies, dim=-1)), _mask(9, window)
    )
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    weight = torch.randn_like(got)
    gradients = [torch.autograd.grad((out * weight).sum(), x, retain_graph=True)[0] for out in (got, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)
    theirs_gradients = torch.autograd.grad((expected * weight).sum(), list(pairs.values()))
    gradients_of_ours = torch.autograd.grad((got * weight).sum(), [ours.get_parameter(name) for name in pairs])
    torch.testing.assert_close(gradients_of_ours, theirs_gradients, rtol=1e-10, atol=1e-12)


class _Norm(torch.nn.Module):
    """Compute in float64; the transformers version rounds to float32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def test_gate_and_partial_rotation_equal_qwen3_next_of_transformers() -> None:
    # Here, not above: the ranks of other tests import this file.
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

    config = Qwen3NextConfig(hidden_size=12, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    config._attn_implementation = "sdpa"  # its eager attention rounds to float32
    module = Qwen3NextAttention(config, layer_idx=0)
    for name in ("q_norm", "k_norm"):
        setattr(module, name, _Norm(8))
    ours = GroupedQueryAttention(
        12, num_heads=4, num_kv_heads=2, head_dim=8, qk_norm_eps=1e-6, output_gate=True, rotary_dim=4, init_std=0.4
    ).double()
    weights = {name: torch.randn_like(weight, requires_grad=True) for name, weight in ours.named_parameters()}

    def theirs(*inputs: Any) -> tuple[Tensor, None]:
        # transformers projects query and gate of a head with one matrix, side by side.
        rest = dict(weights)
        queries, gates = rest.pop("q_proj.weight"), rest.pop("gate_proj.weight")
        merged = torch.stack((queries.unflatten(0, (4, 8)), gates.unflatten(0, (4, 8))), dim=1).flatten(0, 2)
        return functional_call(module.double(), {**rest, "q_proj.weight": merged}, inputs)

    _assert_same(ours, theirs, weights, window=None, copies=2)


@pytest.mark.parametrize("window", [None, 4])
def test_sinks_and_window_equal_gpt_oss_of_transformers(window: int | None) -> None:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

    config = GptOssConfig(
        hidden_size=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        attention_bias=False,
    )
    config._attn_implementation = "eager"
    theirs = GptOssAttention(config, layer_idx=0).double()
    torch.nn.init.normal_(theirs.sinks)
    ours = GroupedQueryAttention(
        12, num_heads=4, num_kv_heads=2, head_dim=8, sinks=True, options=AttentionOptions(window=window)
    ).double()
    pairs = {f"{name}_proj.weight": theirs.get_parameter(f"{name}_proj.weight") for name in "qkvo"}
    _assert_same(ours, theirs, {**pairs, "sinks.weight": theirs.sinks}, window=window, copies=1)


def _everything(*, backends: list[Any] | None = None) -> GroupedQueryAttention:
    return GroupedQueryAttention(
        12,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        qk_norm_eps=1e-6,
        output_gate=True,
        sinks=True,
        rotary_dim=4,
        rotary_layout="interleaved",
        options=AttentionOptions(window=5, scale=0.5, softcap=3.0),
        backends=backends,
        init_std=0.4,
    )


def test_no_attention_across_packed_documents() -> None:
    for attention in (
        _everything().double(),
        GroupedQueryAttention(12, num_heads=4, num_kv_heads=2, head_dim=8, rotary_dim=4, init_std=0.4).double(),
    ):
        x = torch.randn(1, 9, 12, dtype=torch.float64)
        positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
        tables = rotary_tables(positions, head_dim=8, rotary_dim=4, theta=100.0)
        documents = torch.tensor([[3] * 4 + [1] * 5])
        packed = attention(x, tables, document_ids_BL=documents)
        alone = [
            attention(x[:, part], type(tables)(tables.cos[:, part], tables.sin[:, part]))
            for part in (slice(0, 4), slice(4, 9))
        ]
        torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-12, atol=1e-12)
        assert not torch.allclose(packed, attention(x, tables))


def _nothing(q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, *, documents_BS: Tensor | None = None) -> Tensor:
    assert documents_BS is None
    return 0 * q_BLHK


def test_only_attention_without_options_is_standard_sdpa() -> None:
    plain = GroupedQueryAttention(12, num_heads=4, num_kv_heads=2, head_dim=8)
    chosen = GroupedQueryAttention(12, num_heads=4, num_kv_heads=2, head_dim=8, backends=["eager"])
    for attention, is_standard_sdpa in ((plain, True), (chosen, False), (_everything(), False)):
        assert isinstance(attention.attention_function, ChosenAttention)
        assert attention.attention_function.is_standard_sdpa is is_standard_sdpa
    x, tables = torch.randn(1, 3, 12), rotary_tables(torch.arange(3).unsqueeze(0), head_dim=8, theta=100.0)
    chosen.load_state_dict(plain.state_dict())
    torch.testing.assert_close(chosen(x, tables), plain(x, tables))
    plain.attention_function = _nothing
    assert not plain(x, tables).any()


def test_the_environment_variable_is_read_when_a_layer_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("D9D_ATTENTION", "sdpa")
    attention = _everything()
    monkeypatch.delenv("D9D_ATTENTION")
    tables = rotary_tables(torch.arange(3).unsqueeze(0), head_dim=8, rotary_dim=4, theta=100.0)
    with pytest.raises(UserError, match=r"no allowed attention backend .*\n- sdpa has no softcap"):
        attention(torch.randn(1, 3, 12), tables)


def test_materialize_after_construction_on_meta_sets_all_parameters() -> None:
    with torch.device("meta"):
        attention = _everything()
        tables = rotary_tables(torch.arange(3).unsqueeze(0), head_dim=8, rotary_dim=4, theta=100.0)
        assert attention(torch.empty(2, 3, 12), tables).shape == (2, 3, 12)
    materialize(attention, device=torch.device("cpu"), seed=0)
    assert all(parameter.any() for parameter in attention.parameters())
    tables = rotary_tables(torch.arange(3).unsqueeze(0), head_dim=8, rotary_dim=4, theta=100.0)
    assert attention(torch.randn(2, 3, 12), tables).isfinite().all()


def test_checkpointing_does_not_change_gradients() -> None:
    x, tables = torch.randn(2, 6, 12), rotary_tables(torch.arange(6).unsqueeze(0), head_dim=8, rotary_dim=4, theta=9.0)
    plain, checkpointed = _everything(), _everything()
    checkpointed.load_state_dict(plain.state_dict())
    checkpoint_activations(checkpointed)
    for attention in (plain, checkpointed):
        attention(x, tables, document_ids_BL=torch.tensor([[0, 0, 1, 1, 1, 2]] * 2)).sum().backward()
    for parameter, other in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(other.grad, parameter.grad, rtol=0, atol=0)


def test_compiled_without_a_break() -> None:
    attention = GroupedQueryAttention(12, num_heads=4, num_kv_heads=2, head_dim=8, sinks=True, output_gate=True)
    attention.attention_function = _everything(backends=["eager"]).attention_function
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    x, tables = torch.randn(2, 6, 12), rotary_tables(torch.arange(6).unsqueeze(0), head_dim=8, theta=9.0)
    torch.testing.assert_close(compiled(x, tables), attention(x, tables))


def test_tables_and_documents_of_wrong_shape_raise() -> None:
    attention = _everything()
    x = torch.randn(2, 3, 12)
    for head_dim, length in ((8, 3), (4, 2)):
        tables = rotary_tables(torch.arange(length).unsqueeze(0), head_dim=head_dim, theta=9.0)
        with pytest.raises(
            UserError, match=r"got rotary tables of shape .* of 2 pairs per position: .* rotary_dim = 4\."
        ):
            attention(x, tables)
    tables = rotary_tables(torch.arange(3).unsqueeze(0), head_dim=8, rotary_dim=4, theta=9.0)
    for documents in (torch.zeros(1, 3, dtype=torch.int64), torch.zeros(2, 3)):
        with pytest.raises(UserError, match=r"got document_ids_BL of shape .*; expected integers of shape \(2, 3\)"):
            attention(x, tables, document_ids_BL=documents)


def _train(parallelism: str, method: ContextMethod = "all_gather") -> tuple[Tensor, dict[str, Tensor]]:
    """Return output and gradients of a layer with all options over packed documents."""
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(2, 8, 12, dtype=torch.float64, generator=draws)
    documents = torch.tensor([[0] * 3 + [1] * 5, [0] * 7 + [1]])
    config = MeshConfig(**{parallelism: -1})
    with config.build() as ctx:
        with torch.device("meta"):
            layer = _everything()
            model = torch.nn.ModuleDict({"attention": layer}).double()
        tp, cp = ctx.mesh_for("dense")["tp"], ctx.mesh_for("batch")["cp"]
        parallelize_tensor(model, tp, layer.tensor_plan("attention"))
        parallelize_context(model, cp, method=method)
        if cp.size() > 1:
            parallelize_fsdp(model["attention"], ctx.mesh_for("dense")["dp_cp_shard"])
        materialize(model, device=ctx.device, seed=0)
        split = ContextSplit(cp)
        x, documents, positions = (y.to(ctx.device) for y in split.split((x, documents, torch.arange(8).unsqueeze(0))))
        tables = rotary_tables(positions, head_dim=8, rotary_dim=4, theta=100.0)
        out = model["attention"](x, tables, document_ids_BL=documents)
        (out * x).sum().backward()
        sync_gradients(model)
        return split.join(out.detach()), full_gradients(model)


@pytest.mark.parametrize(
    ("parallelism", "method"),
    [
        ("tensor_parallel", "all_gather"),
        ("context_parallel_shard", "all_gather"),
        ("context_parallel_shard", "all_to_all"),
    ],
)
def test_two_ranks_equal_one(parallelism: str, method: ContextMethod) -> None:
    ((expected, gradients),) = run_ranks(_train, parallelism, method, world_size=1)
    for got, found in run_ranks(_train, parallelism, method):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        assert_trees_close(found, gradients, rtol=1e-11)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (0, 0)])
def test_empty_inputs_give_empty_outputs(shape: tuple[int, int]) -> None:
    attention = GroupedQueryAttention(8, num_heads=4, num_kv_heads=2, head_dim=4, sinks=True, output_gate=True)
    positions = torch.arange(shape[1]).expand(*shape)
    x_BLD = torch.randn(*shape, 8, requires_grad=True)
    out_BLD = attention(
        x_BLD, rotary_tables(positions, head_dim=4, theta=1e4), document_ids_BL=torch.zeros(shape).long()
    )
    assert out_BLD.shape == (*shape, 8)
    out_BLD.sum().backward()
    assert x_BLD.grad is not None


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_kv_heads": 0}, "num_heads = 4, num_kv_heads = 0; query heads are divided evenly"),
        ({"rotary_dim": 3}, "rotary_dim = 3; expected an even number of features from 2 to head_dim = 4"),
        ({"rotary_dim": 6}, "rotary_dim = 6; expected an even number of features from 2 to head_dim = 4"),
    ],
)
def test_invalid_head_sizes_raise(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        GroupedQueryAttention(8, **{"num_heads": 4, "num_kv_heads": 2, "head_dim": 4, **sizes})  # ty: ignore[invalid-argument-type]
