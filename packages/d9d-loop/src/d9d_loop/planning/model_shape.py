"""Sizes of a job's decoder, read from its parameters and from the operators of one forward pass without values."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from d9d_dist import UserError
from d9d_dist.values.late_init import allocate
from d9d_loop.job.plan import JobPlan
from d9d_loop.model.block_lists import block_lists
from d9d_loop.planning.decoder_shape import DecoderShape
from d9d_loop.planning.dry_run_mode import DryRunMode
from d9d_loop.planning.layer_repeats import repeats_of, without_repeats
from d9d_loop.planning.rank_run import on_fake
from d9d_loop.planning.step_record import Operation, recorded
from d9d_loop.planning.vision_tower import TowerCall
from d9d_loop.task import to_inputs


class UnknownDecoderError(UserError):
    """Error: the model is not a decoder whose step time the planner can compute."""


def shape_of_job(plan: JobPlan) -> tuple[DecoderShape, int]:
    """Return the sizes of a job's decoder, and the number of tokens of a sample.

    The model must be a decoder: an embedding table, and a list of layers that all have attention by
    `torch.nn.functional.scaled_dot_product_attention`. The job must have several ranks, or a provider with `late_init`.

    Raises:
        UnknownDecoderError: If the model is not such a decoder. The message says which part was not found.
    """
    model = plan.model.built.module
    fake = DryRunMode()
    batch = plan.first_batch()
    whole = to_inputs(plan.task.inputs(batch))
    inputs = to_inputs(plan.task.inputs(on_fake(plan, batch, fake)))
    blocks = next(iter(block_lists(model).values()), None)
    if blocks is None:
        raise _unknown("a ModuleList or ModuleDict of layers")
    probe, layers, _ = without_repeats(model, repeats_of(blocks).count - 1)
    probe.to("meta")
    starts: list[int] = []
    call = TowerCall(probe)
    with fake:
        allocate(probe, device=torch.device("cpu"))
        with torch.no_grad(), recorded() as record, suppress(_LastLayerDone):
            for layer in layers:
                layer.register_forward_pre_hook(lambda *_: starts.append(len(record.operations)))
            layers[-1].register_forward_hook(_stop)
            probe(*inputs.first, **inputs.shared)
        tower = call.tower(whole.shared, num_samples=plan.microbatch_size)
    ends = [*starts[1:], len(record.operations)]
    without = [
        index
        for index, (start, end) in enumerate(zip(starts, ends, strict=True))
        if not any(map(_is_attention, record.operations[start:end]))
    ]
    if without and len(without) < len(layers):
        names = sorted({type(layers[index]).__name__ for index in without})
        raise _unknown(f"attention in {len(without)} of {len(layers)} different layers ({', '.join(names)})")
    leaves = pytree.tree_leaves((inputs.shared.get("input_ids"), inputs.first, inputs.shared))
    rows = [x for x in leaves if isinstance(x, Tensor) and x.dim() > 1]
    if not rows:
        raise _unknown("a tensor of token ids with a batch and a sequence dim in the task's inputs")
    operations = record.operations[starts[0] :]  # a tower runs before
    return replace(_shape(model, list(blocks.children()), operations), tower=tower), rows[0].shape[1]


class _LastLayerDone(Exception):  # noqa: N818 - no error
    """Exception that ends a forward pass after the last layer: the planner needs no output head and no loss."""


def _stop(*_: Any) -> None:
    raise _LastLayerDone


def _shape(model: nn.Module, layers: Sequence[nn.Module], operations: Sequence[Operation]) -> DecoderShape:
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    tables = [each for each in model.parameters() if id(each) not in inside and each.dim() == 2]
    if not tables:
        raise _unknown("an embedding table outside of the layers")
    vocab_size, hidden_size = max(tables, key=Tensor.numel).shape
    attention = next(filter(_is_attention, operations), None)
    if attention is None:
        raise _unknown("a call of scaled_dot_product_attention")
    query, key, value = attention.shapes[:3]
    if key[-1] != value[-1]:
        raise _unknown("keys and values of the same size")
    heads, kv_heads, head_dim = query[1], key[1], query[-1]
    kv_heads = _kv_heads(layers[0], heads=heads, kv_heads=kv_heads, head_dim=head_dim, hidden_size=hidden_size)
    attention_size = hidden_size * head_dim * 2 * (heads + kv_heads)
    sizes = [_feed_forward(layer, attention_size) for layer in layers]
    dense = [each for each in sizes if not each.experts]
    sparse = next((each for each in sizes if each.experts), None)
    top = next((each for each in operations if each.name == "topk"), None)
    return DecoderShape(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=len(layers),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=round(dense[0].matrices / 3 / hidden_size) if dense else 0,
        tie_embeddings=len([each for each in tables if each.shape == (vocab_size, hidden_size)]) == 1,
        num_experts=sparse.num_experts if sparse else 0,
        top_k=top.results[0][-1] if sparse and top else 0,
        expert_size=round(sparse.experts / (3 * hidden_size * sparse.num_experts)) if sparse else 0,
        num_dense_layers=len(dense) if sparse else 0,
        shared_size=max(0, round((sparse.matrices / hidden_size - sparse.num_experts) / 3)) if sparse else 0,
    )


def _kv_heads(layer: nn.Module, *, heads: int, kv_heads: int, head_dim: int, hidden_size: int) -> int:
    """Return the number of key heads, from the smallest projection: attention may receive repeated key heads.

    Only siblings of a projection to all query heads count, because a router also maps the hidden size to a few outputs.
    """
    for module in layer.modules():
        outputs = [
            each.shape[0]
            for child in module.children()
            for each in child.parameters(recurse=False)
            if each.dim() == 2 and each.shape[1] == hidden_size
        ]
        if heads * head_dim in outputs:
            candidates = [size // head_dim for size in outputs if size % head_dim == 0]
            return min([kv_heads, *(each for each in candidates if heads % each == 0)])
    return kv_heads


def _is_attention(operation: Operation) -> bool:
    return "scaled_dot_product" in operation.name


class _FeedForward(NamedTuple):
    """Numbers of parameters of a layer's matrices outside attention and of its experts, and its number of experts."""

    matrices: int
    experts: int
    num_experts: int


def _feed_forward(layer: nn.Module, attention_size: int) -> _FeedForward:
    """Return the sizes of a layer's feed-forward part.

    If most parameters of a layer are frozen, only these are counted: the trainable parameters are adapters.
    """
    parameters = list(layer.parameters())
    frozen = [each for each in parameters if not each.requires_grad]
    if 2 * sum(map(Tensor.numel, frozen)) > sum(map(Tensor.numel, parameters)):
        parameters = frozen
    matrices = sum(each.numel() for each in parameters if each.dim() == 2)
    experts = [each for each in parameters if each.dim() == 3]
    num_experts = experts[0].shape[0] if experts else 0
    return _FeedForward(matrices - attention_size, sum(map(Tensor.numel, experts)), num_experts)


def _unknown(part: str) -> UnknownDecoderError:
    return UnknownDecoderError(
        f"the planner found no {part} in the model; expected a decoder with scaled_dot_product_attention. Pass its "
        "sizes: plan_cluster(trainer, ..., shape=DecoderShape(...), length=...)."
    )
