import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from d9d_dist import UserError, materialize
from d9d_modules import SwiGLU
from d9d_modules.decoder import HiddenAndLosses
from d9d_moe import Dispatcher, LocalDispatcher, MoELayer, RouterLosses, SharedExperts, TopKRouter
from d9d_moe.dispatch import CombineHandle, Dispatched
from d9d_moe.router import Routing


def _moe(
    hidden_size: int,
    intermediate_size: int,
    *,
    num_experts: int,
    top_k: int,
    renormalize: bool = True,
    init_std: float = 0.02,
    dispatcher: Dispatcher | None = None,
) -> MoELayer:
    router = TopKRouter(hidden_size, num_experts=num_experts, top_k=top_k, renormalize=renormalize, init_std=init_std)
    return MoELayer(
        hidden_size, intermediate_size, router=router, init_std=init_std, dispatcher=dispatcher or LocalDispatcher()
    )


def _dense_sum(moe: MoELayer, x: Tensor) -> Tensor:
    """Apply all experts to all tokens, weighted by a matrix that is zero for experts that were not chosen."""
    tokens = x.flatten(0, -2)
    routing = moe.router(tokens)
    weights = torch.zeros(len(tokens), moe.num_experts, dtype=x.dtype)
    weights = weights.scatter(1, routing.indices, routing.probabilities)
    total = torch.zeros_like(tokens)
    for expert in range(moe.num_experts):
        state = {name: tensor[expert] for name, tensor in moe.experts.named_parameters()}
        dense = SwiGLU(x.shape[-1], 7).to(x.dtype)
        total = total + weights[:, expert : expert + 1] * torch.func.functional_call(dense, state, (tokens,))
    return total.view_as(x)


def test_autocast_affects_only_the_experts() -> None:
    moe, x = _moe(16, 16, num_experts=4, top_k=2, init_std=0.5), torch.randn(5, 16)
    routing = moe.router(x)
    with torch.autocast("cpu", torch.bfloat16):
        got = moe(x)
        answers = []
        for expert in range(4):
            gate, up, down = (each[expert] for each in moe.experts.parameters())
            answers.append(F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down))
    chosen = torch.stack(answers, dim=1)[torch.arange(5).unsqueeze(1), routing.indices]
    expected = (chosen.float() * routing.probabilities.unsqueeze(-1)).sum(1)
    assert got.dtype == chosen.dtype == torch.bfloat16
    torch.testing.assert_close(got, expected.bfloat16())


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_matches_dense_sum_over_experts_weighted_by_the_router(top_k: int, renormalize: bool) -> None:
    moe = _moe(6, 7, num_experts=5, top_k=top_k, renormalize=renormalize, init_std=0.7).double()
    x = torch.randn(2, 4, 6, dtype=torch.float64, requires_grad=True)
    got, expected = moe(x), _dense_sum(moe, x)
    torch.testing.assert_close(got, expected)
    inputs = (x, *moe.parameters())
    gradient = torch.randn_like(x)
    # With one renormalized expert the weight is always 1, so the router gets no gradient in the loop.
    wanted = torch.autograd.grad(expected, inputs, gradient)
    torch.testing.assert_close(torch.autograd.grad(got, inputs, gradient), wanted)


def test_all_tokens_to_one_expert() -> None:
    moe = _moe(6, 7, num_experts=5, top_k=1).double()
    with torch.no_grad():
        weight = moe.get_parameter("router.weight")
        weight.zero_()
        weight[3] = 100.0
    x = torch.rand(9, 6, dtype=torch.float64) + 0.1
    assert moe.router(x).indices.eq(3).all()
    torch.testing.assert_close(moe(x), _dense_sum(moe, x))
    moe(x).sum().backward()
    gradient = moe.experts.down_proj.weight.grad
    assert gradient is not None
    assert [bool(expert.any()) for expert in gradient] == [False, False, False, True, False]


def test_zero_tokens() -> None:
    moe = _moe(8, 8, num_experts=4, top_k=2)
    y = moe(torch.zeros(0, 3, 8))
    assert y.shape == (0, 3, 8)
    y.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.eq(0).all() for parameter in moe.parameters())


def test_activation_checkpointing_gives_the_same_gradients() -> None:
    moe = _moe(8, 8, num_experts=4, top_k=2)
    x = torch.randn(5, 8, requires_grad=True)
    inputs = (x, *moe.parameters())
    expected = torch.autograd.grad(moe(x).square().sum(), inputs)
    got = torch.autograd.grad(checkpoint(moe, x, use_reentrant=False).square().sum(), inputs)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_custom_dispatcher_is_used() -> None:
    class Recording:
        def __init__(self) -> None:
            self.counts: list[int] = []

        def dispatch(self, tokens_TD: Tensor, routing: Routing, *, num_experts: int) -> Dispatched:
            dispatched = LocalDispatcher().dispatch(tokens_TD, routing, num_experts=num_experts)
            self.counts = dispatched.counts.tolist()
            return dispatched

    recording = Recording()
    _moe(4, 4, num_experts=3, top_k=2, dispatcher=recording)(torch.randn(5, 4))
    assert sum(recording.counts) == 10


def test_materialize_from_meta_draws_initial_weights() -> None:
    with torch.device("meta"):
        model = nn.Sequential(_moe(32, 48, num_experts=4, top_k=2, init_std=0.1))
    materialize(model, device=torch.device("cpu"), seed=0)
    for name, parameter in model.named_parameters():
        assert abs(parameter.std().item() - 0.1) < 0.02, name


def test_top_k_above_num_experts_is_refused() -> None:
    with pytest.raises(UserError, match=r"top_k = 3; expected 1 <= top_k <= num_experts = 2"):
        _moe(4, 4, num_experts=2, top_k=3)


def test_shared_experts_see_every_token() -> None:
    router = TopKRouter(6, num_experts=4, top_k=2, init_std=1.0)
    shared = SharedExperts(6, 5, is_gated=True, init_std=0.7)
    moe = MoELayer(6, 7, router=router, shared=shared, init_std=0.7).double()
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    assert shared.gate is not None
    gate = (x @ shared.gate.weight.T).sigmoid()
    torch.testing.assert_close(moe(x), _dense_sum(moe, x) + gate * shared.experts(x))
    ungated = SharedExperts(6, 5, init_std=0.7).double()
    torch.testing.assert_close(ungated(x), ungated.experts(x))


def test_returns_router_losses_with_hidden_states() -> None:
    router = TopKRouter(6, num_experts=4, top_k=2, init_std=1.0)
    moe = MoELayer(6, 7, router=router, losses=RouterLosses(z=0.5)).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    y = moe(x)
    assert isinstance(y, HiddenAndLosses)
    torch.testing.assert_close(y.hidden, _dense_sum(moe, x))
    torch.testing.assert_close(y.losses, 0.5 * (x @ router.weight.T).logsumexp(-1).square())


def test_router_losses_are_zero_in_evaluation() -> None:
    moe = MoELayer(8, 8, router=TopKRouter(8, num_experts=4, top_k=2), losses=RouterLosses(balance=1.0, z=1.0)).eval()
    x = torch.randn(2, 3, 8)
    evaluated = moe(x)
    assert evaluated.losses.shape == (2, 3)
    assert evaluated.losses.eq(0).all()
    trained = moe.train()(x)
    assert trained.losses.gt(0).all()
    assert torch.equal(trained.hidden, evaluated.hidden)


def test_mask_of_wrong_shape_is_refused() -> None:
    with pytest.raises(UserError, match=r"the mask has shape \(2, 4\); expected \(2, 3\), one number for each token"):
        _moe(4, 4, num_experts=2, top_k=1)(torch.randn(2, 3, 4), mask_BL=torch.ones(2, 4))


def test_shared_experts_overlap_with_combine() -> None:
    events: list[str] = []

    class Recording:
        def dispatch(self, tokens_TD: Tensor, routing: Routing, *, num_experts: int) -> Dispatched:
            dispatched = LocalDispatcher().dispatch(tokens_TD, routing, num_experts=num_experts)

            def combine(outputs_ND: Tensor) -> CombineHandle:
                events.append("leave")
                combining = dispatched.combine(outputs_ND)
                return CombineHandle(lambda: (events.append("wait"), combining.wait())[1])

            return Dispatched(dispatched.rows, dispatched.counts, combine)

    shared = SharedExperts(8, 8)
    shared.register_forward_hook(lambda *_: events.append("shared"))
    router = TopKRouter(8, num_experts=4, top_k=2)
    MoELayer(8, 8, router=router, shared=shared, dispatcher=Recording())(torch.randn(3, 8))
    assert events == ["leave", "shared", "wait"]


class _DroppingRouter(nn.Module):
    """Router of a user with a capacity: it drops some choices, by the index -1."""

    num_experts, top_k = 4, 2

    def __init__(self, indices: Tensor) -> None:
        super().__init__()
        self.inner = TopKRouter(6, num_experts=4, top_k=2, init_std=0.5)
        self.given = indices

    def forward(self, x_TD: Tensor) -> Routing:
        routing = self.inner(x_TD, self.given.clamp(0, 3))
        return routing._replace(indices=self.given)


DROPPED = torch.tensor([[0, 1], [-1, 2], [3, -1], [-1, -1], [2, 0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("has_gradient", [True, False])
def test_a_dropped_choice_adds_nothing_and_changes_no_other_token(dtype: torch.dtype, has_gradient: bool) -> None:
    losses = RouterLosses(balance=0.1, z=0.1)
    moe = MoELayer(6, 7, router=_DroppingRouter(DROPPED), init_std=0.5, losses=losses).to(dtype)
    x = torch.randn(1, 5, 6, dtype=dtype)
    with torch.set_grad_enabled(has_gradient):
        y = moe(x)
    assert isinstance(y, HiddenAndLosses)
    routing = moe.router(x[0])
    expected = torch.zeros_like(x[0])
    for token, choices in enumerate(DROPPED.tolist()):
        for slot, expert in enumerate(choices):
            if expert >= 0:
                state = {name: tensor[expert] for name, tensor in moe.experts.named_parameters()}
                out = torch.func.functional_call(SwiGLU(6, 7).to(dtype), state, (x[0, token : token + 1],))
                expected[token] += routing.probabilities[token, slot] * out[0]
    torch.testing.assert_close(y.hidden[0], expected)
    if has_gradient:
        y.hidden.sum().backward()
        assert moe.counter.counts.tolist() == [2, 1, 2, 1]
    load = torch.tensor([2, 1, 2, 1], dtype=dtype) * 4 / 6
    assert routing.scores is not None
    assert routing.logits is not None
    balance = 0.1 * (routing.scores * load).sum(-1) + 0.1 * routing.logits.logsumexp(-1).square()
    torch.testing.assert_close(y.losses[0], balance)


def test_an_expert_beyond_the_last_one_is_an_error() -> None:
    moe = MoELayer(6, 7, router=_DroppingRouter(DROPPED + 1))
    with pytest.raises(UserError, match=r"got the router's expert indices.* from 4 to 4; expected"):
        moe(torch.randn(5, 6))
