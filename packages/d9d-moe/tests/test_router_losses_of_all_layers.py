"""Comparison with an independent implementation: `load_balancing_loss_func` of `transformers`."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from d9d_dist import MeshConfig, StageInfo, UserError
from d9d_dist.testing import KeepFloat64, run_ranks
from d9d_moe import JointBalance, Qwen3MoeForCausalLM, Qwen3MoeParams, RouterLosses, TopKRouter, token_records
from d9d_moe.router_losses import BalanceScope, TokenGroups, token_losses

NUM_EXPERTS, TOP_K = 5, 2
ROUNDING = torch.finfo(torch.float32).eps
"""transformers divides counts in float32, which rounds once. All terms of the loss are positive, so none cancels."""


def _joint(scope: BalanceScope = "batch", z: float = 0.0) -> RouterLosses:
    return RouterLosses(balance=0.3, definition="transformers", scope=scope, z=z)


def _routers(num_layers: int) -> list[TopKRouter]:
    return [TopKRouter(6, num_experts=NUM_EXPERTS, top_k=TOP_K, init_std=1.0).double() for _ in range(num_layers)]


def _expected(logits: list[Tensor], mask: Tensor | None = None) -> Tensor:
    # Here, not above: the ranks of other tests import this file.
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    with KeepFloat64():
        loss = load_balancing_loss_func(tuple(logits), NUM_EXPERTS, TOP_K, mask)  # ty: ignore[invalid-argument-type]
    assert isinstance(loss, Tensor)
    return 0.3 * loss


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("num_layers", [1, 2, 8])
def test_loss_over_all_layers_matches_transformers(num_layers: int, masked: bool) -> None:
    routers, inputs = _routers(num_layers), torch.randn(num_layers, 3 * 7, 6, dtype=torch.float64)
    mask = torch.rand(3, 7) < 0.6 if masked else None
    mask_T = None if mask is None else mask.flatten()
    routings = [router(x) for router, x in zip(routers, inputs, strict=True)]
    records = sum(token_records(routing, _joint(), mask_T=mask_T) for routing in routings)
    assert isinstance(records, Tensor)
    losses_BL = JointBalance(_joint())(records.unflatten(0, (3, 7)))
    got = losses_BL.sum() / (21 if mask is None else mask.sum())
    expected = _expected([routing.logits for routing in routings if routing.logits is not None], mask)
    torch.testing.assert_close(got, expected, rtol=ROUNDING, atol=0)
    weights = [router.weight for router in routers]
    # Terms of experts and tokens cancel in gradients, by up to a factor of 16.
    for found, wanted in zip(
        torch.autograd.grad(got, weights, retain_graph=True), torch.autograd.grad(expected, weights), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=0, atol=16 * ROUNDING * wanted.abs().max().item())
    if mask is not None:
        assert losses_BL[~mask].eq(0).all()
    # With more than one layer the two definitions differ by more than a factor of top_k.
    own = sum(
        token_losses(each, RouterLosses(balance=0.3, scope="batch"), TokenGroups(), rows=3, mask_T=mask_T).sum()
        for each in routings
    )
    ratio = own / (got * (21 if mask is None else mask.sum()))
    assert (ratio.item() == pytest.approx(1 / TOP_K, rel=ROUNDING)) is (num_layers == 1)


def test_sequence_scope_computes_the_loss_per_row() -> None:
    routers, inputs = _routers(2), torch.randn(2, 3, 7, 6, dtype=torch.float64)
    routings = [router(x.flatten(0, 1)) for router, x in zip(routers, inputs, strict=True)]
    records = sum(token_records(routing, _joint("sequence")) for routing in routings)
    assert isinstance(records, Tensor)
    rows = JointBalance(_joint("sequence"))(records.unflatten(0, (3, 7))).mean(dim=1)
    expected = [
        _expected([router(x[row]).logits for router, x in zip(routers, inputs, strict=True)]) for row in range(3)
    ]
    torch.testing.assert_close(rows, torch.stack(expected), rtol=ROUNDING, atol=0)


def _of_a_rank(x: Tensor, weight: Tensor) -> Tensor:
    with MeshConfig(data_parallel_replicate=-1).build() as ctx:
        router = TopKRouter(6, num_experts=NUM_EXPERTS, top_k=TOP_K).double()
        router.weight.data = weight
        balance = JointBalance(_joint())
        balance.token_groups = TokenGroups(batch=ctx.group_for("batch", "dp"))
        return balance(token_records(router(x[ctx.rank]), _joint()).unsqueeze(0)).detach()


def test_counts_are_summed_over_ranks() -> None:
    router, x = *_routers(1), torch.randn(2, 7, 6, dtype=torch.float64)
    expected = JointBalance(_joint())(token_records(router(x.flatten(0, 1)), _joint()).unflatten(0, (2, 7)))
    losses = torch.cat(run_ranks(_of_a_rank, x, router.weight.detach(), world_size=2))
    torch.testing.assert_close(losses, expected.detach())


PARAMS = Qwen3MoeParams(
    vocab_size=11,
    hidden_size=12,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=6,
    intermediate_size=8,
    initializer_range=0.5,
    num_experts=NUM_EXPERTS,
    top_k=TOP_K,
    expert_intermediate_size=8,
    router_losses=_joint(z=0.1),
)


@pytest.mark.parametrize("dense_layers", [(), (0,), (2,), (0, 1, 2)])
def test_records_pass_through_pipeline_stages(dense_layers: tuple[int, ...]) -> None:
    params = replace(PARAMS, dense_layers=dense_layers)
    whole = Qwen3MoeForCausalLM(params).double()
    plain = Qwen3MoeForCausalLM(replace(params, router_losses=RouterLosses())).double()
    plain.load_state_dict(whole.state_dict())
    input_ids, labels = torch.randint(0, 11, (2, 2, 7))
    hidden: Tensor | tuple[Tensor, Tensor] = input_ids
    for index in range(3):
        stage = Qwen3MoeForCausalLM(params, StageInfo(index, 3)).double()
        stage.load_state_dict({name: whole.state_dict()[name] for name in stage.state_dict()})
        hidden = stage(hidden, labels=labels)
    losses = whole(input_ids, labels=labels)
    torch.testing.assert_close(hidden, losses)
    logits: list[Tensor] = []
    for router in plain.modules():
        if isinstance(router, TopKRouter):
            router.register_forward_hook(lambda _module, _args, routing: logits.append(routing.logits))
    without = plain(input_ids, labels=labels)
    expected = torch.zeros((), dtype=torch.float64)
    if logits:
        z = sum(0.1 * each.logsumexp(dim=-1).square().mean() for each in logits)
        expected = _expected(logits) + z
    torch.testing.assert_close((losses - without).mean(), expected, rtol=ROUNDING, atol=1e-12)
    whole.eval()
    torch.testing.assert_close(whole(input_ids, labels=labels), without)


def test_unsupported_scope_and_unknown_definition_are_refused() -> None:
    with pytest.raises(UserError, match=r'definition = "transformers" with scope = "global_batch".*expected scope'):
        RouterLosses(balance=1.0, definition="transformers", scope="global_batch")
    with pytest.raises(UserError, match=r"router_losses\.definition = 'sum'; expected one of per_layer, transformers"):
        RouterLosses(definition="sum")  # ty: ignore[invalid-argument-type]
