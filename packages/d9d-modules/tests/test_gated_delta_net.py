import math
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

from d9d_dist import (
    ContextSplit,
    MeshConfig,
    SplitBackward,
    UserError,
    materialize,
    parallelize_context,
    parallelize_hsdp,
    parallelize_tensor,
    sync_gradients,
)
from d9d_dist.testing import KeepFloat64, assert_rounds_like, assert_trees_close, full_gradients, run_ranks
from d9d_modules import DecoderLayer, SwiGLU, checkpoint_activations, rotary_tables
from d9d_modules.decay_gate import LogSigmoidDecayGate
from d9d_modules.gated_delta_net import GatedDeltaNet


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


@pytest.mark.slow
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
def test_outputs_and_gradients_equal_qwen3_next_of_transformers(
    *, num_key_heads: int, group: int, key_dim: int, value_dim: int, conv_width: int, length: int, seed: int
) -> None:
    # Here, not above: the ranks of other tests import this file.
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

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
    with KeepFloat64():
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


def test_empty_rows_and_meta_tensors_have_the_right_shapes() -> None:
    assert _layer()(torch.zeros(2, 0, 12)).shape == (2, 0, 12)
    assert _layer().to("meta")(torch.zeros(2, 7, 12, device="meta")).shape == (2, 7, 12)


def test_a_gated_delta_net_replaces_attention_in_a_decoder_layer() -> None:
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
@pytest.mark.sample("True")
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


LENGTH = 24
DOCUMENTS = {
    "one": None,
    # Starts: within a chunk, at the start of a chunk, two in the positions that the next chunk's convolution needs.
    "packed": [0] * 4 + [1] * 2 + [2] * 7 + [3] * 4 + [4] * 1 + [5] * 5 + [4] * 1,
}


def _context_parallel(kind: str, degrees: dict[str, int]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the output of whole rows and the full gradients."""
    torch.manual_seed(3)
    with MeshConfig(**degrees).build() as ctx:
        gate = LogSigmoidDecayGate(4, normalizer=2.0)
        nn.init.normal_(gate.bias)
        layer = GatedDeltaNet(
            12, num_key_heads=2, num_value_heads=4, key_dim=3, value_dim=5, init_std=0.4, decay_gate=gate
        )
        model = nn.ModuleDict({"mixer": layer}).double().to(ctx.device)
        x, direction = torch.randn(2, 2, LENGTH, 12, dtype=torch.float64).to(ctx.device)
        ids = DOCUMENTS[kind]
        documents = None if ids is None else torch.tensor([ids, ids[::-1]], device=ctx.device)
        cp, dense = ctx.mesh_for("batch")["cp"], ctx.mesh_for("dense")
        parallelize_tensor(model, dense["tp"], layer.tensor_plan("mixer"))
        parallelize_context(model, cp)
        parallelize_hsdp(layer, dense["dp_replicate", "dp_cp_shard", "cp_replicate"], shard_axis="dp_cp_shard")
        split = ContextSplit(cp)
        part, part_of_direction = split.split((x, direction))
        out = model["mixer"](part, document_ids_BL=None if documents is None else split.split(documents))
        (out * part_of_direction).sum().backward()
        sync_gradients(model)
        return split.join(out.detach()).cpu(), full_gradients(model)


@pytest.mark.parametrize(
    ("kind", "degrees"),
    [
        ("packed", {"context_parallel_shard": 2}),
        ("one", {"context_parallel_shard": 2}),
        ("packed", {"context_parallel_shard": 2, "tensor_parallel": 2}),
        pytest.param("packed", {"context_parallel_shard": 2, "context_parallel_replicate": 2}, marks=pytest.mark.full),
    ],
)
def test_context_parallel_ranks_equal_one(kind: str, degrees: dict[str, int]) -> None:
    ((expected, gradients),) = run_ranks(_context_parallel, kind, {}, world_size=1)
    for out, found in run_ranks(_context_parallel, kind, degrees, world_size=math.prod(degrees.values())):
        torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)
        assert_trees_close(found, gradients, rtol=1e-10)


def _received(length: int) -> int:
    """Return the numbers that a rank receives from other ranks in forward, for two rows."""
    received = 0
    real = dist.all_gather_into_tensor

    def counting(output: Tensor, shard: Tensor, *args: Any, **options: Any) -> Any:
        nonlocal received
        received += output.numel() - shard.numel()
        return real(output, shard, *args, **options)

    with MeshConfig(context_parallel_shard=-1).build() as ctx:
        layer = _layer().to(ctx.device)
        parallelize_context(layer, ctx.mesh_for("batch")["cp"])
        with mock.patch.object(dist, "all_gather_into_tensor", counting):
            layer(torch.randn(2, length, 12, device=ctx.device))
    return received


def test_ranks_exchange_states_and_not_sequences() -> None:
    """For each chunk of another rank, a state [H, K, V], its transition [H, K, K], and three positions [F]."""
    per_chunk = 4 * 3 * (5 + 3) + 3 * (2 * 6 + 20)
    for length in (12, 96):
        assert run_ranks(_received, length, world_size=2) == [2 * 2 * per_chunk] * 2


def test_short_chunks_are_refused() -> None:
    messages = run_ranks(_short, world_size=2)
    assert messages == ["got 4 positions of a row; expected two chunks of at least 3 positions"] * 2


def _short() -> str:
    with MeshConfig(context_parallel_shard=-1).build() as ctx:
        layer = _layer().to(ctx.device)
        parallelize_context(layer, ctx.mesh_for("batch")["cp"])
        try:
            layer(torch.randn(1, 4, 12, device=ctx.device))
        except UserError as error:
            return str(error).split(", which")[0]
    return "computed"


def test_invalid_input_raises() -> None:
    with pytest.raises(
        UserError, match=r"num_key_heads = 3, num_value_heads = 4; .*: use a num_key_heads that divides"
    ):
        GatedDeltaNet(12, num_key_heads=3, num_value_heads=4, key_dim=3, value_dim=5)
    with pytest.raises(
        UserError, match=r"got document_ids_BL of shape \(5,\) and dtype torch\.int64; expected integers"
    ):
        _layer()(torch.randn(1, 5, 12), document_ids_BL=torch.zeros(5, dtype=torch.int64))
