"""Layout and traits of a job, from its configuration and dry run, and names of the traits that are not modeled."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from d9d_loop.job.flop_measurement import rows_of
from d9d_loop.job.plan import JobPlan
from d9d_loop.planning.decoder_shape import DecoderShape, Tower
from d9d_loop.planning.plan_layout import PlanLayout, Recompute
from d9d_loop.planning.rank_run import DryRun
from d9d_loop.task import to_inputs
from d9d_pipeline import Overlap

_UNCOUNTED = 0.05
"""Largest relative difference to the closed form's parameter count, due to biases for example, that is not reported."""


def layout_of(plan: JobPlan, runs: Sequence[DryRun], shape: DecoderShape | None, *, length: int) -> PlanLayout:
    """Return the layout of a job from runs of its ranks in stage order. `length` is the number of tokens per sample."""
    run, inputs = runs[0], to_inputs(plan.task.inputs(plan.first_batch()))
    mesh, schedule = plan.model.mesh, plan.model.schedule
    shards = mesh.data_parallel_shard * mesh.context_parallel_shard
    operators = {each.name for each in run.forward_backward.operations}
    recompute, every = recomputation_of(run, None if shape is None else shape.tower)
    cost = plan.model.provider.first_cost(plan.model.built.module, lambda: inputs)
    positions: Any = inputs.shared.get("logits_to_keep")
    layout = PlanLayout(
        tp=mesh.tensor_parallel,
        pp=mesh.pipeline_parallel,
        cp=mesh.context_parallel_shard * mesh.context_parallel_replicate,
        dp=mesh.data_parallel_replicate * mesh.data_parallel_shard,
        ep=mesh.expert_parallel,
        stages_per_rank=schedule.stages_per_rank,
        placement=schedule.placement,
        virtual_layers=(plan.model.provider.virtual_layers, 0),
        tower_layers=cost or 0.0,
        microbatch_size=plan.microbatch_size,
        num_microbatches=plan.num_microbatches,
        length=length,
        recompute=recompute,
        recompute_every=every,
        sharding="parameters" if shards > 1 else "replicated",
        shard_ranks=shards,
        reduces_each_microbatch=plan.config.gradients.reduce_each_microbatch,
        pointwise="compiled" if run.is_compiled or plan.config.compile is not None else "eager",
        groups_experts=any("grouped_mm" in name for name in operators) or "bmm" in operators,
        dropout=any("dropout" in name for name in operators),
        weight_bytes=run.dtype.itemsize if plan.config.precision in ("parameters", "autocast") else 2,
        stored_weight_bytes=run.parameter_bytes / run.num_parameters,
        # Averages over all parameters; frozen ones have neither gradients nor optimizer state.
        gradient_bytes=run.gradient_bytes / run.num_parameters,
        kept_gradient_bytes=run.gradient_bytes / run.num_parameters,
        master_bytes=run.optimizer_bytes / run.num_parameters,
        logit_share=positions.numel() / rows_of(inputs)[0].numel() if isinstance(positions, torch.Tensor) else 1.0,
    )
    layout = replace(layout, sequence_parallel=_splits_sequences(run, layout))
    at_once = layout.logit_tokens if shape is None else max(_logit_tokens(each, layout, shape) for each in runs)
    return layout if at_once >= layout.logit_tokens else replace(layout, loss_chunk=at_once)


def recomputation_of(run: DryRun, tower: Tower | None = None) -> tuple[Recompute, int]:
    """Return the kind of recomputation in the backward pass, and n if every n-th layer is recomputed.

    Each checkpointed layer runs its operators twice. For an operator that occurs only in layers, 1 / n of the calls are
    repeated. For an operator that also occurs outside of layers, the fraction is smaller, so the largest fraction
    counts. Attention of a tower is not counted.
    """
    again, once = Counter[str](), Counter[str]()
    products = set[str]()
    for each in run.forward_backward.operations:
        (again if each.is_recomputed else once)[each.name] += 1
        if each.flops and each.is_recomputed:
            products.add(each.name)
    repeated, backward = run.attention_calls(_shapes_of(tower))
    if backward and repeated:
        return "full", max(1, round(backward / repeated))
    if not again:
        return "none", 1
    share = max(min(1.0, count / once[name]) for name, count in again.items() if name in once)
    return "full" if products else "selective", max(1, round(1 / share))


def unmodeled_traits(plan: JobPlan, run: DryRun, layout: PlanLayout, shape: DecoderShape) -> tuple[str, ...]:
    """Return the traits of a job that change its step time, but that the time model ignores."""
    operators = {each.name for each in run.forward_backward.operations}
    found = _unmodeled_passes(plan)
    if (method := _context_method(run, layout, shape)) is not None:
        found.append(f"context parallelism by {method} (timed as an all-gather)")
    if layout.ep > 1 and not any(each.name == "all_to_all" for each in run.forward_backward.collectives):
        found.append("the job's own dispatch of experts (timed as an all-to-all)")
    if any("scaled_mm" in name or "scaled_grouped_mm" in name for name in operators):
        found.append("products in float8 (timed as bfloat16)")
    if plan.config.precision in ("parameters", "autocast") and run.dtype != torch.bfloat16:
        found.append(f"products in {run.dtype} (timed as bfloat16)".replace("torch.", ""))
    if run.num_trainable < run.num_parameters:
        frozen = 1 - run.num_trainable / run.num_parameters
        found.append(
            f"frozen parameters, {frozen:.1%} of the rank's (their weight gradients are timed, though not run)"
        )
    if any(each.flops for each in run.update.operations):
        found.append("matrix products of the optimizer (its memory traffic is timed)")
    parts = [each for rank in plan.model.program.ranks for each in rank]
    if any(isinstance(each, Overlap) for each in parts):
        found.append("overlap of forward and backward passes by the schedule (timed one after the other)")
    whole = sum(each.numel() for each in plan.model.built.module.parameters())
    if abs(whole - shape.num_parameters) > _UNCOUNTED * whole:
        share = (whole - shape.num_parameters) / whole
        found.append(
            f"{abs(share):.0%} of the parameters ({'more' if share > 0 else 'fewer'} than the timed decoder of "
            "identical layers)"
        )
    return tuple(found)


def _unmodeled_passes(plan: JobPlan) -> list[str]:
    found = [] if plan.reference is None else ["the forward pass of the reference"]
    rows, _ = rows_of(to_inputs(plan.task.inputs(plan.first_batch())))
    if len(rows) != (size := plan.microbatch_size):
        found.append(f"microbatches with {len(rows)} rows for {size} sample{'s' * (size > 1)} (timed as {size})")
    return found


def _logit_tokens(run: DryRun, layout: PlanLayout, shape: DecoderShape) -> float:
    """Return the number of tokens whose logits exist at the same time; 0 without logits.

    It is the number of logits divided by the size of the rank's part of the vocabulary: unsplit logits count more.
    """
    vocabulary = -(-shape.vocab_size // layout.tp)
    sizes = {vocabulary, shape.vocab_size}
    results = (result for each in run.forward_backward.operations for result in each.results)
    rows = (result for result in results if len(result) > 1 and result[-1] in sizes)
    return max((torch.Size(result).numel() / vocabulary for result in rows), default=0.0)


def _shapes_of(tower: Tower | None) -> set[Any]:
    return set() if tower is None else {each.shapes for each in (*tower.forward, *tower.backward)}


def _splits_sequences(run: DryRun, layout: PlanLayout) -> bool:
    """Return True if tensor-parallel ranks scatter activations, or without tensor parallelism."""
    start = run.rank - run.rank % layout.tp
    ranks = tuple(range(start, start + layout.tp))
    return layout.tp == 1 or any(
        each.name == "reduce_scatter" and each.ranks == ranks for each in run.forward_backward.collectives
    )


def _context_method(run: DryRun, layout: PlanLayout, shape: DecoderShape) -> str | None:
    """Return the context-parallel method; None for all-gathers of keys and values, or without context parallelism."""
    if layout.cp == 1:
        return None
    own = _shapes_of(shape.tower)
    operations = (each for each in run.forward_backward.operations if each.shapes not in own)
    attention = next((each for each in operations if "scaled_dot_product" in each.name), None)
    if attention is None:
        return "a ring, or another method without scaled_dot_product_attention"
    return "all-to-all of heads" if attention.shapes[0][-2] == layout.length else None
