import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from d9d_dist import MeshConfig, SplitBackward, UserError
from d9d_dist.testing import run_ranks
from d9d_moe import (
    MoELayer,
    RouterLosses,
    SigmoidRouter,
    TopKRouter,
    balance_experts,
    load_statistics,
    pop_tokens_per_expert,
)
from d9d_moe.expert_balance import update_expert_bias, update_global_load


def _model() -> nn.Sequential:
    router = SigmoidRouter(8, num_experts=4, top_k=2, init_std=1.0)
    return nn.Sequential(MoELayer(8, 8, router=router, init_std=0.5))


def _expected(model: nn.Module, x: Tensor) -> Tensor:
    router = model.get_submodule("0.router")
    return torch.bincount(router(x).indices.flatten(), minlength=4)


def test_backward_counts_each_microbatch_once() -> None:
    model, x, y = _model(), torch.randn(5, 8), torch.randn(3, 8)
    model(x).sum().backward()
    model(y).sum().backward()
    counts = pop_tokens_per_expert(model)
    assert torch.equal(counts["0"], _expected(model, x) + _expected(model, y))
    assert pop_tokens_per_expert(model)["0"].eq(0).all()


def test_evaluation_and_forward_without_backward_are_not_counted() -> None:
    model, x = _model(), torch.randn(5, 8)
    with torch.no_grad():
        model(x)
    model(x)
    model.eval()(x)
    assert pop_tokens_per_expert(model)["0"].eq(0).all()


FROZEN = {"router": ["0.router.weight"], "all": ["0.router", "0.experts"], "all but the router": ["0.experts"]}


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_frozen_layers_are_counted(frozen: str, is_recomputed: bool) -> None:
    model, x, head = _model(), torch.randn(5, 8), nn.Linear(8, 1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(FROZEN[frozen])))
    y = checkpoint(model, x, use_reentrant=False) if is_recomputed else model(x)
    head(y).sum().backward()
    assert torch.equal(pop_tokens_per_expert(model)["0"], _expected(model, x))
    with torch.no_grad():
        model(x)
    model.eval()(x)
    assert pop_tokens_per_expert(model)["0"].eq(0).all()


def test_frozen_layer_with_activation_checkpointing_is_counted_once() -> None:
    model, x = _model(), torch.randn(5, 8)
    part = nn.Sequential(model.requires_grad_(False), nn.Linear(8, 8))
    checkpoint(part, x, use_reentrant=False).sum().backward()
    assert torch.equal(pop_tokens_per_expert(model)["0"], _expected(model, x))


def test_activation_checkpointing_is_counted_once() -> None:
    model, x = _model(), torch.randn(5, 8, requires_grad=True)
    checkpoint(model, x, use_reentrant=False).sum().backward()
    assert torch.equal(pop_tokens_per_expert(model)["0"], _expected(model, x))


def test_split_backward_counts_once_and_defers_weight_gradients() -> None:
    model, x = _model(), torch.randn(5, 8, requires_grad=True)
    split = SplitBackward()
    with split.forward():
        y = model(x)
    later = split.backward([y.sum()], [None])
    weight = model.get_parameter("0.experts.up_proj.weight")
    assert weight.grad is None
    later.compute()
    assert torch.equal(pop_tokens_per_expert(model)["0"], _expected(model, x))
    got = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(got, {name: parameter.grad for name, parameter in model.named_parameters()})


def test_bias_decreases_for_overloaded_experts() -> None:
    model = _model()
    update_expert_bias(model, {"0": torch.tensor([10, 0, 5, 5])}, rate=0.1)
    bias = model.get_buffer("0.router.selection_bias")
    torch.testing.assert_close(bias, torch.tensor([-0.1, 0.1, 0.0, 0.0]))


def test_routers_without_a_bias_are_skipped() -> None:
    model = nn.Sequential(MoELayer(8, 8, router=TopKRouter(8, num_experts=4, top_k=2)))
    model(torch.randn(5, 8)).sum().backward()
    counts = pop_tokens_per_expert(model)
    assert counts["0"].sum() == 10
    update_expert_bias(model, counts)
    assert pop_tokens_per_expert(nn.Linear(2, 2)) == {}


def test_bias_of_a_softmax_router_is_updated() -> None:
    model = nn.Sequential(MoELayer(8, 8, router=TopKRouter(8, num_experts=4, top_k=2, balance_bias=True)))
    update_expert_bias(model, {"0": torch.tensor([10, 0, 5, 5])}, rate=0.1)
    torch.testing.assert_close(model.get_buffer("0.router.selection_bias"), torch.tensor([-0.1, 0.1, 0.0, 0.0]))


def test_bias_updates_balance_the_load() -> None:
    torch.manual_seed(0)
    model, x = _model(), torch.randn(256, 8) + 1.0
    for _ in range(200):
        model(x).sum().backward()
        counts = pop_tokens_per_expert(model)
        update_expert_bias(model, counts, rate=0.01)
    assert load_statistics(counts["0"]).max_over_mean <= 1.3


def test_a_negative_rate_is_refused() -> None:
    with pytest.raises(UserError, match=r"rate = -0\.1; expected 0 or above"):
        update_expert_bias(_model(), {}, rate=-0.1)


def test_statistics_of_even_and_skewed_loads() -> None:
    even = load_statistics(torch.tensor([3, 3, 3, 3]))
    assert (even.max_over_mean.item(), even.entropy.item()) == pytest.approx((1.0, 1.0))
    skewed = load_statistics(torch.tensor([0, 12, 0, 0]))
    assert [each.item() for each in skewed] == pytest.approx([4.0, 0.0, 3.0, 0.0])
    assert load_statistics(torch.zeros(4, dtype=torch.int64)).max_over_mean == 0
    layers = load_statistics(torch.tensor([[3, 3, 3, 3], [0, 12, 0, 0]]))
    torch.testing.assert_close(tuple(layers), tuple(torch.stack(pair) for pair in zip(even, skewed, strict=True)))


def _following_model() -> nn.Sequential:
    losses = RouterLosses(balance=1.0, scope="global_batch")
    router = SigmoidRouter(8, num_experts=4, top_k=2, init_std=1.0)
    return nn.Sequential(MoELayer(8, 8, router=router, losses=losses))


def test_global_load_is_the_load_of_the_previous_step() -> None:
    model, x = _following_model(), torch.randn(3, 5, 8)
    load = model.get_buffer("0.global_load")
    assert load.eq(1).all()
    hidden, losses = model(x)
    torch.testing.assert_close(losses, torch.ones(3, 5))  # shares add up to 1: before the first step nothing pulls
    (hidden.sum() + losses.sum()).backward()
    seen = _expected(model, x)
    assert torch.equal(balance_experts(model, rate=0.25)["0"], seen)
    torch.testing.assert_close(load, seen * 4 / seen.sum())
    torch.testing.assert_close(
        model.get_buffer("0.router.selection_bias"), 0.25 * (seen.double().mean() - seen).sign().float()
    )
    before = load.clone()
    update_global_load(model, {"0": torch.zeros(4, dtype=torch.int64)})  # as of a layer that no gradient reaches
    assert torch.equal(load, before)
    assert "0.global_load" in model.state_dict()
    assert "0.global_load" not in _model().state_dict()


@pytest.mark.parametrize("taken", [True, False, torch.tensor(True), torch.tensor(False)])
def test_skipped_step_changes_no_bias_and_no_load(taken: Tensor | bool) -> None:
    model, x = _following_model(), torch.randn(3, 5, 8)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    sum(part.sum() for part in model(x)).backward()
    assert torch.equal(balance_experts(model, taken=taken)["0"], _expected_before(model, before, x))
    for name in ("0.global_load", "0.router.selection_bias"):
        assert torch.equal(before[name], model.get_buffer(name)) is not bool(taken)


def _expected_before(model: nn.Module, before: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return the tokens per expert with the buffers from before the update."""
    now = model.get_buffer("0.router.selection_bias").clone()
    model.get_buffer("0.router.selection_bias").copy_(before["0.router.selection_bias"])
    expected = _expected(model, x)
    model.get_buffer("0.router.selection_bias").copy_(now)
    return expected


def _refusal() -> str:
    with MeshConfig(data_parallel_replicate=-1).build():
        try:
            balance_experts(_model())
        except UserError as error:
            return str(error)
        return ""


def test_several_ranks_without_token_groups_are_refused() -> None:
    for message in run_ranks(_refusal, world_size=2):
        assert "0 counts only the tokens of its own rank, but there are 2 ranks" in message
        assert "Call parallelize_moe(model, ctx), even with an expert-parallel degree of 1" in message


def test_half_precision_bias_is_refused() -> None:
    model = _model().bfloat16()
    with pytest.raises(UserError, match=r"the selection bias of 0 is torch.bfloat16; expected float32"):
        balance_experts(model)


def test_global_batch_losses_balance_the_load() -> None:
    torch.manual_seed(0)
    router = TopKRouter(8, num_experts=4, top_k=1, init_std=1.0)
    losses = RouterLosses(balance=1.0, scope="global_batch")
    model, x = nn.Sequential(MoELayer(8, 8, router=router, losses=losses)), torch.randn(4, 64, 8) + 1.0
    optimizer = torch.optim.SGD([router.weight], lr=0.3)
    loads = []
    for _ in range(100):
        for part in x.chunk(2):  # one step of two microbatches
            hidden, costs = model(part)
            (costs.sum() / 256 + 0 * hidden.sum()).backward()
        loads.append(load_statistics(balance_experts(model)["0"]).max_over_mean.item())
        optimizer.step()
        optimizer.zero_grad()
    assert loads[0] > 1.5
    assert loads[-1] < 1.25
