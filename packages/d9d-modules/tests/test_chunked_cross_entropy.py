from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from d9d_dist import MeshConfig, SplitBackward, UserError
from d9d_dist.testing import run_ranks
from d9d_modules import chunked_cross_entropy as module_under_test
from d9d_modules.chunked_cross_entropy import linear_cross_entropy
from d9d_modules.cross_entropy import CrossEntropy
from d9d_modules.vocabulary_scores import token_scores

SIZE = 6
LOSSES = [CrossEntropy(), CrossEntropy(z_loss=0.1), CrossEntropy(label_smoothing=0.2, z_loss=0.05)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink tiles: several token tiles and vocabulary blocks, the last ones smaller."""
    monkeypatch.setattr(module_under_test, "HOST_TILE", module_under_test.TileSize(logits=40, tokens=4))


def _draw(num_tokens: int, splits: Sequence[int], seed: int = 0) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=draws)

    labels = torch.randint(0, sum(splits), (num_tokens,), generator=draws)
    labels[1::4] = -100
    weights = [normal(size, SIZE).requires_grad_() for size in splits]
    return normal(num_tokens, SIZE).requires_grad_(), weights, labels, normal(num_tokens)


def _reference(
    hidden: Tensor, weights: list[Tensor], labels: Tensor, loss: CrossEntropy, softcap: float | None
) -> Tensor:
    logits = hidden @ torch.cat(weights).T
    return loss(logits if softcap is None else softcap * torch.tanh(logits / softcap), labels)


@settings(max_examples=40)
@given(
    num_tokens=st.integers(0, 14),
    splits=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    loss=st.sampled_from(LOSSES),
    softcap=st.sampled_from([None, 2.0]),
    seed=st.integers(0, 2**16),
)
def test_losses_and_gradients_equal_a_computation_from_all_logits(
    num_tokens: int, splits: list[int], loss: CrossEntropy, softcap: float | None, seed: int
) -> None:
    hidden, weights, labels, gradient = _draw(num_tokens, splits, seed)
    expected = _reference(hidden, weights, labels, loss, softcap)
    losses = linear_cross_entropy(hidden, weights, labels, loss=loss, softcap=softcap)
    torch.testing.assert_close(losses, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(
        torch.autograd.grad(losses, (hidden, *weights), gradient),
        torch.autograd.grad(expected, (hidden, *weights), gradient),
        rtol=1e-10,
        atol=1e-10,
    )


def test_large_logits_neither_overflow_nor_lose_the_rest() -> None:
    hidden, weights, labels, _ = _draw(9, [33])
    with torch.no_grad():
        hidden *= 300.0
    losses = linear_cross_entropy(hidden, weights, labels)
    expected = _reference(hidden, weights, labels, CrossEntropy(), None)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(
        torch.autograd.grad(losses.sum(), (hidden, *weights)), torch.autograd.grad(expected.sum(), (hidden, *weights))
    )


@pytest.mark.parametrize("place", [0, 3])
@pytest.mark.parametrize("outlier", [-3e4, -3e7, -torch.inf])
def test_a_row_with_zero_probability_does_not_change_the_loss(place: int, outlier: float) -> None:
    weight = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.5, 0.0]]).repeat(2, 1)
    hidden, labels = torch.tensor([[1.0, 0.0]], requires_grad=True), torch.tensor([1])
    rest = torch.cat((weight[:place], weight[place + 1 :]))
    weight[place, 0] = outlier
    weight.requires_grad_()
    expected = F.cross_entropy((hidden @ rest.t()).double(), labels - int(place < 1), reduction="none")
    losses = linear_cross_entropy(hidden, [weight], labels)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=0.0)
    if outlier > -torch.inf:
        (gradient,) = torch.autograd.grad(losses, weight)
        assert gradient[:, 0].sum().abs() < 1e-6


class _Sizes(TorchDispatchMode):
    """Count matrix products and record the largest result."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.products = 0, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.mm.out)
        self.largest = max([self.largest, *(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor))])
        return result


def test_no_tensor_is_larger_than_a_tile_or_a_gradient() -> None:
    hidden, weights, labels, gradient = _draw(16, [500])
    losses = linear_cross_entropy(hidden, weights, labels)
    with _Sizes() as sizes:
        losses = linear_cross_entropy(hidden, weights, labels)
        torch.autograd.grad(losses, (hidden, *weights), gradient)
    assert sizes.largest == weights[0].numel() < 16 * 500


def test_no_work_for_tensors_without_gradient() -> None:
    hidden, weights, labels, gradient = _draw(4, [10, 10])

    def products(*needed: Tensor) -> int:
        for x in (hidden, *weights):
            x.requires_grad_(any(x is other for other in needed))
        with _Sizes() as sizes:
            losses = linear_cross_entropy(hidden, weights, labels)
            if needed:
                torch.autograd.grad(losses, needed, gradient)
        return sizes.products

    assert products() == 2  # the logits of both weights
    assert products(hidden) == 4
    assert products(weights[1]) == 4  # recomputed logits, and the weight gradient
    assert products(hidden, weights[1]) == 6
    with torch.no_grad():
        assert products() == 2


def test_the_gradient_of_a_bfloat16_weight_is_rounded_once() -> None:
    """Many tokens with the same label: a bfloat16 sum of ones would saturate at 256."""
    hidden = torch.ones(2000, 2, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(4, 2, dtype=torch.bfloat16, requires_grad=True)
    losses = linear_cross_entropy(hidden, [weight], torch.zeros(2000, dtype=torch.int64))
    assert losses.dtype == torch.float32
    (gradient,) = torch.autograd.grad(losses.sum(), weight)
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient[:, 0].float(), torch.tensor([-1500.0, 500, 500, 500]), rtol=2**-8, atol=0)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_split_backward_defers_weight_gradients(recompute: bool) -> None:
    hidden, weights, labels, gradient = _draw(11, [20, 13])
    expected = torch.autograd.grad(
        _reference(hidden, weights, labels, CrossEntropy(), None), (hidden, *weights), gradient
    )
    split = SplitBackward()

    def forward(hidden: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weights, labels)

    with split.forward():
        losses = checkpoint(forward, hidden, use_reentrant=False) if recompute else forward(hidden)
    later = split.backward([losses], [gradient])
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad, expected[0], rtol=1e-10, atol=1e-10)
    assert [weight.grad for weight in weights] == [None, None]
    later.compute()
    for weight, wanted in zip(weights, expected[1:], strict=True):
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad, wanted, rtol=1e-10, atol=1e-10)


def test_shapes_are_inferred_on_meta() -> None:
    hidden, weight = torch.randn(9, SIZE, device="meta", requires_grad=True), torch.randn(30, SIZE, device="meta")
    losses = linear_cross_entropy(hidden, [weight], torch.zeros(9, dtype=torch.int64, device="meta"))
    assert losses.shape == (9,)
    assert losses.is_meta


def _on_ranks(loss: CrossEntropy, softcap: float | None) -> tuple[Tensor, Tensor, list[Tensor]]:
    with MeshConfig(tensor_parallel=-1).build() as ctx:
        mesh = ctx.mesh_for("dense")["tp"]
        hidden, weights, labels, gradient = _draw(11, [24])
        local = weights[0].detach().chunk(mesh.size())[ctx.rank].split(8)  # a vocabulary shard may consist of splits
        parts = [part.clone().requires_grad_() for part in local]
        loss = CrossEntropy(z_loss=loss.z_loss, label_smoothing=loss.label_smoothing, mesh=mesh)
        losses = linear_cross_entropy(hidden, parts, labels, loss=loss, softcap=softcap)
        grad_hidden, *grad_parts = torch.autograd.grad(losses, (hidden, *parts), gradient)
        return losses.detach(), grad_hidden, grad_parts


@pytest.mark.parametrize(("loss", "softcap"), [(LOSSES[0], None), (LOSSES[2], 2.0)])
def test_the_vocabulary_is_sharded_over_ranks(loss: CrossEntropy, softcap: float | None) -> None:
    hidden, weights, labels, gradient = _draw(11, [24])
    expected = _reference(hidden, weights, labels, loss, softcap)
    grad_hidden, grad_weight = torch.autograd.grad(expected, (hidden, *weights), gradient)
    ranks = run_ranks(_on_ranks, loss, softcap, world_size=2)
    for losses, _, _ in ranks:
        torch.testing.assert_close(losses, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(sum(grad for _, grad, _ in ranks), grad_hidden, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.cat([part for *_, parts in ranks for part in parts]), grad_weight)


@pytest.mark.parametrize("function", [linear_cross_entropy, token_scores])
@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([1, 2, 3, -1, 4], r"got labels from -1 to -1; expected labels within 0 \.\.\. 10 or -100"),
        ([1, 2, 3, 11, 4], "got labels from 11 to 11"),
        ([1, 2, 3, -99, 4], "got labels from -99 to -99"),
        ([1, 2, 3], r"got labels of shape \(3,\) for hidden states of shape \(5, 8\); expected \(5,\)"),
        ([[1], [2], [3], [4], [5]], r"got labels of shape \(5, 1\)"),
        ([1], r"got labels of shape \(1,\)"),
    ],
)
def test_labels_outside_of_the_vocabulary_and_missing_labels_raise(
    function: Callable[..., object], labels: list[int], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        function(torch.randn(5, 8), [torch.randn(6, 8), torch.randn(5, 8)], torch.tensor(labels))


@pytest.mark.parametrize("function", [linear_cross_entropy, token_scores])
def test_a_single_weight_labels_of_another_dtype_and_a_softcap_of_zero_raise(
    function: Callable[..., object],
) -> None:
    hidden, weight, labels = torch.randn(5, 8), torch.randn(6, 8), torch.zeros(5, dtype=torch.int64)
    with pytest.raises(UserError, match=r"got weights_VD as a tensor of shape \(6, 8\); .* Pass \[weight\]\."):
        function(hidden, weight, labels)
    for dtype in (torch.float32, torch.bool):
        with pytest.raises(UserError, match=rf"got labels of {dtype}; expected integers"):
            function(hidden, [weight], labels.to(dtype))
    with pytest.raises(UserError, match=r"softcap = 0.0; expected a number above 0, or None"):
        function(hidden, [weight], labels, softcap=0.0)


def test_labels_are_checked_without_a_host_synchronization(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator: the device checks the condition."""
    asserted: list[Tensor] = []
    monkeypatch.setattr(torch, "_assert_async", lambda condition, message: asserted.append(condition))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    linear_cross_entropy(torch.randn(2, 8), [torch.randn(5, 8)], torch.tensor([1, 5]))
    assert [bool(each) for each in asserted] == [False]
