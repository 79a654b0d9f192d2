from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from d9d_dist import (
    MeshConfig,
    SplitBackward,
    UserError,
    materialize,
    parallelize_context,
    parallelize_tensor,
    sync_gradients,
)
from d9d_dist.testing import assert_rounds_like, assert_trees_close, full_gradients, run_ranks
from d9d_modules import DecoderLayer, GroupedQueryAttention, SwiGLU, checkpoint_activations, rotary_tables
from d9d_modules.gated_delta_net import GatedDeltaNet


class _KeepsFloat64(TorchFunctionMode):
    """Patch transformers, which rounds to float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            if func is Tensor.to:
                args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        return func(*args, **(kwargs or {}))


def _in_their_layout(weights: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Merge weights as in transformers: projections interleave by key head, convolutions are concatenated."""

    def interleaved(*names: str) -> Tensor:
        by_head = [weights[f"{name}_proj.weight"].unflatten(0, (config.linear_num_key_heads, -1)) for name in names]
        return torch.cat(by_head, dim=1).flatten(0, 1)

    return {
        "in_proj_qkvz.weight": interleaved("q", "k", "v", "gate"),
        "in_proj_ba.weight": interleaved("beta", "decay"),
        "conv1d.weight": torch.cat([weights[f"{name}_conv.weight"] for name in "qkv"]).unsqueeze(1),
        "dt_bias": weights["decay_gate.bias"],
        "A_log": weights["decay_gate.log_rate"],
        "norm.weight": weights["norm.weight"],
        "out_proj.weight": weights["o_proj.weight"],
    }


@settings(max_examples=30)
@given(
    num_key_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    key_dim=st.integers(4, 8),
    value_dim=st.integers(4, 8),
    conv_width=st.integers(1, 5),
    length=st.integers(1, 130),
    seed=st.integers(0, 999),
)
def test_outputs_and_gradients_as_in_qwen3_next(
    *, num_key_heads: int, group: int, key_dim: int, value_dim: int, conv_width: int, length: int, seed: int
) -> None:
    # Here, not above: the ranks of other tests import this file.
    from transformers import Qwen3NextConfig  # noqa: PLC0415
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet  # noqa: PLC0415

    torch.manual_seed(seed)
    config = Qwen3NextConfig(
        hidden_size=8,
        linear_num_key_heads=num_key_heads,
        linear_num_value_heads=num_key_heads * group,
        linear_key_head_dim=key_dim,
        linear_value_head_dim=value_dim,
        linear_conv_kernel_dim=conv_width,
        num_hidden_layers=1,
        rms_norm_eps=0.01,  # a small epsilon would amplify rounding errors of small values
    )
    theirs = Qwen3NextGatedDeltaNet(config, layer_idx=0).double()
    ours = GatedDeltaNet(
        8,
        num_key_heads=num_key_heads,
        num_value_heads=num_key_heads * group,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_width=conv_width,
        norm_eps=0.01,
        init_std=0.5,
    )
    nn.init.normal_(ours.norm.weight)
    weights = {name: weight.detach().double().requires_grad_() for name, weight in ours.named_parameters()}
    x = torch.randn(2, length, 8).double().requires_grad_()
    direction = torch.randn(2, length, 8)
    with _KeepsFloat64():
        expected = functional_call(theirs, _in_their_layout(weights, config), (x,))
        gradients = torch.autograd.grad((expected * direction).sum(), [x, *weights.values()])
    exact = [each.detach() for each in (expected, *gradients)]
    for dtype in (torch.float32, torch.float64):
        ours, x = ours.to(dtype), x.detach().to(dtype).requires_grad_()
        out = ours(x)
        found = [out, *torch.autograd.grad((out * direction).sum(), [x, *ours.parameters()])]
        # Every position rounds the state once; gradients are sums over positions. In float64 `exact` rounds too.
        multiple = 8 + length if dtype == torch.float32 else 2 * (8 + length)
        assert_rounds_like(found, exact, peer=[each.to(dtype) for each in exact], multiple=multiple)


def _layer() -> GatedDeltaNet:
    return GatedDeltaNet(12, num_key_heads=2, num_value_heads=4, key_dim=3, value_dim=5, init_std=0.4)


def test_packed_documents_equal_separate_rows() -> None:
    layer, x = _layer().double(), torch.randn(2, 20, 12, dtype=torch.float64)
    documents = torch.tensor([[4] * 3 + [9] * 17, [1] * 19 + [0]])
    packed = layer(x, document_ids_BL=documents)
    for row, border in ((0, 3), (1, 19)):
        alone = torch.cat([layer(part) for part in x[row : row + 1].split([border, 20 - border], dim=1)], dim=1)
        torch.testing.assert_close(packed[row : row + 1], alone)


def test_attention_is_causal() -> None:
    layer, x = _layer(), torch.randn(1, 9, 12)
    changed = x.clone()
    changed[:, 5] += 1.0
    same = (layer(changed) == layer(x)).all(-1)
    assert same[0].tolist() == [True] * 5 + [False] * 4


def test_empty_rows_and_shapes_without_values() -> None:
    assert _layer()(torch.zeros(2, 0, 12)).shape == (2, 0, 12)
    assert _layer().to("meta")(torch.zeros(2, 7, 12, device="meta")).shape == (2, 7, 12)


def test_it_replaces_attention_in_a_decoder_layer() -> None:
    layer = DecoderLayer(12, attention=_layer().bfloat16(), feed_forward=SwiGLU(12, 8)).bfloat16()
    x = torch.randn(1, 5, 12).bfloat16()
    rotary = rotary_tables(torch.arange(5).unsqueeze(0), head_dim=2, theta=9.0)
    attended = x + layer.attention(layer.attention_norm(x))
    torch.testing.assert_close(layer(x, rotary), attended + layer.feed_forward(layer.feed_forward_norm(attended)))


@pytest.mark.parametrize("way", ["checkpointed", "split"])
def test_gradients_under_checkpointing_and_split_backward(way: str) -> None:
    layer, documents = _layer().double(), torch.tensor([[0] * 4 + [1] * 5])
    x = torch.randn(1, 9, 12, dtype=torch.float64, requires_grad=True)
    direction = torch.randn_like(x)
    expected = torch.autograd.grad(layer(x, document_ids_BL=documents), [x, *layer.parameters()], direction)
    if way == "checkpointed":
        checkpoint_activations(layer)
        layer(x, document_ids_BL=documents).backward(direction)
    else:
        split = SplitBackward()
        with split.forward():
            out = layer(x, document_ids_BL=documents)
        later = split.backward([out], [direction])
        assert x.grad is not None
        assert len(later) == 7  # every projection
        later.compute()
    found = [leaf.grad for leaf in (x, *layer.parameters())]
    torch.testing.assert_close(found, list(expected), rtol=1e-12, atol=1e-12)


def _train(sequence_parallel: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Return output and gradients over packed documents, with tensor parallelism over all ranks."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 8, 12, dtype=torch.float64, generator=generator)
    documents = torch.tensor([[0] * 3 + [1] * 5, [0] * 7 + [1]])
    with MeshConfig(tensor_parallel=-1).build() as ctx:
        with torch.device("meta"):
            layer = _layer()
            model = nn.ModuleDict({"attention": layer}).double()
        tp = ctx.mesh_for("dense")["tp"]
        plan = layer.tensor_plan("attention", sequence_parallel=sequence_parallel)
        parallelize_tensor(model, tp, plan)
        materialize(model, device=ctx.device, seed=0)
        parts = x.chunk(tp.size(), dim=1) if sequence_parallel else [x] * tp.size()
        part, documents = parts[tp.get_local_rank()].to(ctx.device), documents.to(ctx.device)
        out = model["attention"](part, document_ids_BL=documents)
        (out * part).sum().backward()
        sync_gradients(model)
        return out.detach().cpu(), full_gradients(model)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_ranks_equal_one(sequence_parallel: bool) -> None:
    ((expected, gradients),) = run_ranks(_train, False, world_size=1)
    results = run_ranks(_train, sequence_parallel, world_size=2)
    outs = [out for out, _ in results]
    if sequence_parallel:
        outs = [torch.cat(outs, dim=1)]
    for out in outs:
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    for _, found in results:
        assert_trees_close(found, gradients, rtol=1e-11)


def _ask_for_context_parallelism(method: Any) -> str:
    model = nn.ModuleList([_layer(), GroupedQueryAttention(12, num_heads=2, num_kv_heads=1, head_dim=4)])
    with MeshConfig(context_parallel_shard=-1).build() as ctx:
        try:
            parallelize_context(model, ctx.mesh_for("batch")["cp"], method=method)
        except UserError as error:
            return str(error)
    return "parallelized"


def test_context_parallelism_raises() -> None:
    assert run_ranks(_ask_for_context_parallelism, "all_gather", world_size=1) == ["parallelized"]  # nothing to do
    message = (
        "0, a GatedDeltaNet, carries a recurrent state through the whole row, but 2 context-parallel "
        "ranks shard each sequence; expected one. Set the degree to 1, or use other parallelism."
    )
    assert run_ranks(_ask_for_context_parallelism, "all_gather", world_size=2) == [message] * 2


def test_invalid_input_raises() -> None:
    with pytest.raises(
        UserError, match=r"num_key_heads = 3, num_value_heads = 4; .*: use a num_key_heads that divides"
    ):
        GatedDeltaNet(12, num_key_heads=3, num_value_heads=4, key_dim=3, value_dim=5)
    with pytest.raises(
        UserError, match=r"got document_ids_BL of shape \(5,\) and dtype torch\.int64; expected integers"
    ):
        _layer()(torch.randn(1, 5, 12), document_ids_BL=torch.zeros(5, dtype=torch.int64))
