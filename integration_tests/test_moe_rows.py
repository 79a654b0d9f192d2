"""Expert parallelism gives the results of one process: outputs, counts and biases, in float64."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias, final
from unittest import mock

import pytest
import torch
from oracle_models import MaskedNextToken, samples
from torch import Tensor, nn

import d9d_dist.expert_parallel
import d9d_dist.gradients.gradient_norm
import d9d_loop.testing.oracle
import d9d_modules.models.decoder_tensor_plan
import d9d_moe.all_to_all
import d9d_moe.grouped_linear
import d9d_moe.moe_parallel
from d9d_dist import DistributedContext, StageInfo, canonical_name, gather_from_axis
from d9d_dist.testing import differences, full_gradients
from d9d_loop import GradientsReady, ModelProvider, Trainer
from d9d_loop.testing import Around, Experiment, parse_layout, trace_layout
from d9d_modules import CheckpointPolicy, parallelize_decoder
from d9d_modules.models.decoder_tensor_plan import RowParts
from d9d_moe import (
    DeepseekV3ForCausalLM,
    DeepseekV3Params,
    Qwen3MoeForCausalLM,
    Qwen3MoeParams,
    RouterLosses,
    SigmoidRouter,
    balance_experts,
    parallelize_moe,
)
from d9d_moe.dispatch import Dispatched
from d9d_moe.expert_counts import ExpertCounter
from d9d_moe.router import Routing
from d9d_moe.router_losses import BalanceDefinition, BalanceScope, TokenGroups
from d9d_pipeline import Inputs

RTOL = 1e-9


@final
@dataclass(frozen=True, slots=True)
class Row:
    """Model, options and layout.

    Attributes:
        model: Name of the model.
        layout: Degrees, schedule and microbatch size.
        checkpointing: Activation checkpointing policy.
        shard_replicas: True if ranks with the same experts shard them.
    """

    model: str
    layout: str
    checkpointing: CheckpointPolicy = "none"
    shard_replicas: bool = True

    @property
    def name(self) -> str:
        checkpointing = [] if self.checkpointing == "none" else [self.checkpointing]
        replicas = [] if self.shard_replicas else ["replicas whole"]
        return ",".join([self.model, self.layout, *checkpointing, *replicas])


@final
@dataclass(frozen=True, slots=True)
class MoeProvider(ModelProvider):
    """Builds and parallelizes one of the models as a user does.

    "qwen3" has sequence-level balance and z-losses, "batch" a batch-level loss, "global_batch" one over the step;
    "joint" has one over all layers and the sequence, "joint_batch" over all layers and the batch;
    "padded" is "qwen3" with a token mask; "deepseek" has all features of its family; with "skewed" all tokens go
    to the same experts, and the others get none.
    """

    row: Row
    num_layers: int

    @property
    def params(self) -> Qwen3MoeParams | DeepseekV3Params:
        scopes: dict[str, BalanceScope] = {
            "batch": "batch",
            "global_batch": "global_batch",
            "joint": "sequence",
            "joint_batch": "batch",
        }
        definition: BalanceDefinition = "transformers" if self.row.model.startswith("joint") else "per_layer"
        scope = scopes.get(self.row.model, "sequence")
        losses = RouterLosses(balance=0.5, definition=definition, scope=scope, z=0.1)
        if self.row.model in ("qwen3", "padded", *scopes):
            return Qwen3MoeParams(
                vocab_size=32,
                hidden_size=12,
                num_layers=self.num_layers,
                num_heads=4,
                num_kv_heads=2,
                head_dim=6,
                intermediate_size=20,
                initializer_range=0.2,
                num_experts=8,
                top_k=3,
                expert_intermediate_size=8,
                router_losses=losses,
            )
        return DeepseekV3Params(
            vocab_size=32,
            hidden_size=12,
            num_layers=self.num_layers,
            num_heads=4,
            kv_rank=6,
            q_rank=10,
            head_dim=4,
            rotary_dim=2,
            value_dim=5,
            intermediate_size=20,
            num_dense_layers=1,
            num_experts=8,
            top_k=2,
            expert_intermediate_size=8,
            num_groups=4,
            top_groups=2,
            routed_scale=2.5,
            router_losses=losses,
            initializer_range=0.2,
        )

    def build(self, stage: StageInfo) -> nn.Module:
        params = self.params
        if isinstance(params, Qwen3MoeParams):
            return Qwen3MoeForCausalLM(params, stage)
        model = DeepseekV3ForCausalLM(params, stage)
        if self.row.model == "skewed":
            for router in model.modules():
                if isinstance(router, SigmoidRouter):
                    router.reset_parameters = partial(_reset_skewed, router)
        return model

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        experts = partial(parallelize_moe, shard_replicas=self.row.shard_replicas)
        parallelize_decoder(model, ctx, experts=experts, checkpointing=self.row.checkpointing)


class PaddedNextToken(MaskedNextToken):
    """Passes the token mask to the model."""

    def inputs(self, batch: Any) -> Inputs:
        known = super().inputs(batch)
        return Inputs(*known.first, **known.shared, mask_BL=batch["mask"])


def _reset_skewed(router: SigmoidRouter) -> None:
    SigmoidRouter.reset_parameters(router)
    nn.init.constant_(router.selection_bias[2:4], 100.0)


@contextmanager
def balanced() -> Generator[None]:
    """Make the oracle's Trainer balance experts, and add counts and biases to its trace."""
    counts: dict[str, Tensor] = {}

    class BalancedTrainer(Trainer):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.events.on(GradientsReady, self._balance)

        def _balance(self, ready: GradientsReady) -> None:
            counts.clear()
            counts.update(balance_experts(ready.model, rate=0.05))

    def traced(model: nn.Module) -> dict[str, Tensor]:
        found = {f"counts of {canonical_name(name)}": seen.clone() for name, seen in counts.items()}
        for name, buffer in model.named_buffers():
            if name.endswith(("selection_bias", "global_load")):
                found[canonical_name(name)] = buffer.clone()
        return {**full_gradients(model), **found}

    oracle = d9d_loop.testing.oracle
    with mock.patch.object(oracle, "Trainer", BalancedTrainer), mock.patch.object(oracle, "full_gradients", traced):
        yield


@cache
def _one_process(model: str, num_layers: int) -> dict[str, Any]:
    return _trace(Row(model, ""), num_layers)


def _trace(row: Row, num_layers: int, *, num_steps: int = 2, around: Around = balanced) -> dict[str, Any]:
    task = PaddedNextToken() if row.model == "padded" else MaskedNextToken()
    experiment = Experiment(
        model=MoeProvider(row, num_layers), batch=samples(ragged=True), task=task, num_steps=num_steps
    )
    return trace_layout(experiment, parse_layout(row.layout), around=around)


def _differences(row: Row, *, around: Around = balanced) -> list[str]:
    layout = parse_layout(row.layout)
    num_layers = max(2, layout.mesh.pipeline_parallel * layout.schedule.build().stages_per_rank)
    trace = _trace(row, num_layers, around=around)
    return [str(found) for found in differences(trace, _one_process(row.model, num_layers), rtol=RTOL)]


def _differences_in_the_first_step(row: Row, *, around: Around) -> list[str]:
    trace, expected = _trace(row, 2, num_steps=1, around=around), _one_process(row.model, 2)
    del trace["parameters"]
    return [str(found) for found in differences(trace, {"step 1": expected["step 1"]}, rtol=RTOL)]


ROWS = [
    Row("qwen3", "ep=2,dp_shard=2"),
    Row("qwen3", "ep=2,tp=2"),
    Row("qwen3", "ep=2,cp_shard=2", "full"),
    Row("qwen3", "ep=2,dp_shard=2,tp=2", "selective"),
    Row("qwen3", "ep=4,cp_shard=2,tp=2,microbatch=2"),
    Row("qwen3", "ep=2,dp_replicate=2,dp_shard=2,microbatch=1", shard_replicas=False),
    Row("qwen3", "pp=2,ep=2,tp=2,microbatch=2", "full"),
    Row("qwen3", "pp=2,ep=2,dp_shard=2,schedule=zb1p,microbatch=1"),
    Row("batch", "ep=2,dp_shard=2,tp=2"),
    Row("global_batch", "ep=1,dp_shard=2,microbatch=2"),
    Row("joint", "pp=2,ep=2,tp=2,microbatch=2", "full"),
    Row("joint", "pp=2,ep=2,cp_shard=2,schedule=zb1p,microbatch=1"),
    Row("joint_batch", "pp=2,ep=2,dp_shard=2"),
    Row("padded", "pp=2,ep=4,cp_shard=2,tp=2,microbatch=2", "full"),
    Row("deepseek", "ep=2,dp_shard=2,tp=2", "full"),
    Row("deepseek", "ep=4,dp_shard=4,microbatch=1"),
    Row("deepseek", "ep=2,cp_shard=2,cp_replicate=2", shard_replicas=False),
    Row("deepseek", "pp=2,ep=4,dp_shard=2,tp=2,schedule=zbv,microbatch=1"),
    Row("deepseek", "ep=8,dp_shard=2,cp_shard=2,tp=2", "full"),
    Row("skewed", "ep=4,dp_shard=2,tp=2", "full"),
    Row("skewed", "ep=2,dp_shard=4", shard_replicas=False),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.sample(
    "qwen3,ep=2,tp=2",
    "qwen3,pp=2,ep=2,dp_shard=2,schedule=zb1p,microbatch=1",
)
@pytest.mark.slow(
    "joint_batch,pp=2,ep=2,dp_shard=2",
    "deepseek,ep=2,cp_shard=2,cp_replicate=2,replicas whole",
    "skewed,ep=2,dp_shard=4,replicas whole",
)
def test_expert_parallelism_equals_one_process(row: Row) -> None:
    found = _differences(row)
    assert not found, f"{len(found)} differences. First: {found[:4]}"


# --- deliberate bugs

Bug: TypeAlias = Callable[[], AbstractContextManager[object]]


def _weight_gradients_are_scaled_by_the_degree() -> AbstractContextManager[object]:
    products = d9d_moe.grouped_linear._OUTER_PRODUCTS
    real = products["eager"]
    return mock.patch.dict(products, {"eager": lambda y, x, counts: 2 * real(y, x, counts)})


def _experts_of_a_rank_are_counted_backwards() -> AbstractContextManager[object]:
    real = d9d_moe.all_to_all._local_experts

    def backwards(experts_MA: Tensor, rank: int, num_here: int) -> Tensor:
        own_MA = real(experts_MA, rank, num_here)
        return torch.where(own_MA < num_here, num_here - 1 - own_MA, own_MA)

    return mock.patch.object(d9d_moe.all_to_all, "_local_experts", backwards)


def _with_arrived_weights(change: Callable[[Tensor, Tensor], Tensor]) -> AbstractContextManager[object]:
    real = d9d_moe.all_to_all.dispatch_local

    def changed(rows_MD: Tensor, here: Routing, *, num_experts: int, num_rows: int) -> Dispatched:
        weights_MA = change(here.probabilities, here.indices < num_experts)
        return real(rows_MD, here._replace(probabilities=weights_MA), num_experts=num_experts, num_rows=num_rows)

    return mock.patch.object(d9d_moe.all_to_all, "dispatch_local", changed)


def _weights_count_twice() -> AbstractContextManager[object]:
    return _with_arrived_weights(lambda weights_MA, _: weights_MA.square())


def _a_second_expert_on_a_rank_is_dropped() -> AbstractContextManager[object]:
    return _with_arrived_weights(lambda weights_MA, is_here_MA: weights_MA * (is_here_MA.cumsum(1) == 1))


def _gradients_of_weights_stay_with_the_experts() -> AbstractContextManager[object]:
    return _with_arrived_weights(lambda weights_MA, _: weights_MA.detach())


def _the_bias_weighs() -> AbstractContextManager[object]:
    real = SigmoidRouter.forward

    def weighed(self: SigmoidRouter, x_TD: Tensor) -> Routing:
        routing = real(self, x_TD)
        return routing._replace(probabilities=routing.probabilities + self.selection_bias[routing.indices])

    return mock.patch.object(SigmoidRouter, "forward", weighed)


def _forward_counts() -> AbstractContextManager[object]:
    def forward(self: ExpertCounter, y: Tensor, indices_TA: Tensor, mask_T: Tensor | None = None) -> Tensor:
        if torch.is_grad_enabled():
            self.counts.add_(torch.bincount(indices_TA.flatten(), minlength=len(self.counts)))
        return y

    return mock.patch.object(ExpertCounter, "forward", forward)


def _ranks_do_not_sum_counts_over_a_sequence() -> AbstractContextManager[object]:
    real = TokenGroups
    return mock.patch.object(d9d_moe.moe_parallel, "TokenGroups", lambda sequence, batch: real(None, batch))


def _ranks_take_the_first_part_of_the_mask() -> AbstractContextManager[object]:
    def first_part(self: RowParts, module: nn.Module, mesh: Any, inner: Any, mask_BL: Tensor) -> Tensor:
        return inner(mask_BL.chunk(mesh.size(), dim=1)[0])

    return mock.patch.object(RowParts, "forward", first_part)


def _replicas_of_experts_are_not_added_up() -> AbstractContextManager[object]:
    real = d9d_dist.expert_parallel.compute_locally

    def without_axes(module: nn.Module, *, partial_axes: Any = (), **dtypes: Any) -> Any:
        return real(module, **dtypes)

    return mock.patch.object(d9d_dist.expert_parallel, "compute_locally", without_axes)


def _the_norm_forgets_other_ranks_experts() -> AbstractContextManager[object]:
    real = d9d_dist.gradients.gradient_norm._splits

    def forgetful(mesh: Any, placements: Any) -> Any:
        name, groups = real(mesh, placements)
        return (name, ()) if "ep_shard" in name else (name, groups)

    return mock.patch.object(d9d_dist.gradients.gradient_norm, "_splits", forgetful)


def _router_losses_are_not_joined() -> AbstractContextManager[object]:
    def alone(x: Tensor, mesh: Any, *, dim: int, gradient: str) -> Tensor:
        return (
            torch.cat([x] * mesh.size(), dim=dim)
            if x.ndim == 2
            else gather_from_axis(x, mesh, dim=dim, gradient="equal")
        )

    return mock.patch.object(d9d_modules.models.decoder_tensor_plan, "gather_from_axis", alone)


MUTANTS: list[tuple[Bug, Row]] = [
    (_weight_gradients_are_scaled_by_the_degree, Row("qwen3", "ep=2,dp_shard=2")),
    (_experts_of_a_rank_are_counted_backwards, Row("qwen3", "ep=2,dp_shard=2")),
    (_weights_count_twice, Row("qwen3", "ep=2,dp_shard=2")),
    (_a_second_expert_on_a_rank_is_dropped, Row("qwen3", "ep=2,dp_shard=2")),
    (_gradients_of_weights_stay_with_the_experts, Row("qwen3", "ep=2,dp_shard=2")),
    (_the_bias_weighs, Row("skewed", "ep=2,dp_shard=2")),
    (_forward_counts, Row("deepseek", "ep=2,dp_shard=2", "full")),
    (_ranks_do_not_sum_counts_over_a_sequence, Row("qwen3", "ep=2,cp_shard=2")),
    (_ranks_do_not_sum_counts_over_a_sequence, Row("joint", "ep=2,cp_shard=2")),
    (_replicas_of_experts_are_not_added_up, Row("qwen3", "ep=1,dp_shard=2", shard_replicas=False)),
    (_the_norm_forgets_other_ranks_experts, Row("qwen3", "ep=2,dp_shard=2")),
    (_router_losses_are_not_joined, Row("qwen3", "ep=2,tp=2")),
    (_ranks_take_the_first_part_of_the_mask, Row("padded", "ep=2,tp=2")),
]


@contextmanager
def _balanced_with(bug: Bug) -> Generator[None]:
    with balanced(), bug():
        yield


# The lane `jobs` of .ci/nightly catches the others.
@pytest.mark.slow
@pytest.mark.parametrize(("bug", "row"), MUTANTS, ids=lambda each: getattr(each, "__name__", ""))
@pytest.mark.sample(
    "_gradients_of_weights_stay_with_the_experts-",
    "_the_norm_forgets_other_ranks_experts-",
    "_router_losses_are_not_joined-",
)
def test_a_bug_is_caught(bug: Bug, row: Row) -> None:
    try:
        found = _differences_in_the_first_step(row, around=partial(_balanced_with, bug))
    except AssertionError as error:
        found = [str(error)]  # ranks disagree with each other
    assert found
