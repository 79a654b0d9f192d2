from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from d9d_dist.split_backward import SplitBackward, gradients_wanted

NUM_LAYERS = 3


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, matmuls: Counter[str]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.wanted, ctx.matmuls = gradients_wanted(), matmuls
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.wanted.inputs:
            grad_x = gradients[0] @ weight
            ctx.matmuls["inputs"] += 1
        if ctx.wanted.weights:
            grad_weight = gradients[0].T @ x
            ctx.matmuls["weights"] += 1
        return grad_x, grad_weight, None


class _Stage:
    """Layers of `_Linear`, whose outputs are kept: there the second pass starts."""

    def __init__(self, seed: int) -> None:
        draws = torch.Generator().manual_seed(seed)
        x, *weights = (torch.randn(4, 4, dtype=torch.float64, generator=draws) for _ in range(1 + NUM_LAYERS))
        self.x, self.weights = x.requires_grad_(), [weight.requires_grad_() for weight in weights]
        self.matmuls: Counter[str] = Counter()
        self.split = SplitBackward()
        self.between: list[Tensor] = []
        self.loss = x.new_zeros(())

    def forward(self) -> None:
        with self.split.forward():
            h = self.x
            for weight in self.weights:
                h = _Linear.apply(h.tanh(), weight, self.matmuls)
                self.between.append(h)
            self.loss = h.square().sum()

    def joint(self) -> list[Tensor]:
        return list(torch.autograd.grad(self.loss, [self.x, *self.weights], retain_graph=True))

    def inputs(self) -> tuple[Tensor, list[Tensor]]:
        with self.split.only_inputs():
            grad_x, *grads = torch.autograd.grad(self.loss, [self.x, *self.between], retain_graph=True)
        return grad_x, grads

    def weight_gradients(self, grads: list[Tensor]) -> list[Tensor]:
        with self.split.only_weights():
            return [
                torch.autograd.grad(h, weight, grad)[0]
                for h, weight, grad in zip(self.between, self.weights, grads, strict=True)
            ]


def _expected(seed: int) -> list[Tensor]:
    stage = _Stage(seed)
    h = stage.x
    for weight in stage.weights:
        h = torch.nn.functional.linear(h.tanh(), weight)
    return list(torch.autograd.grad(h.square().sum(), [stage.x, *stage.weights]))


def _are_equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_two_passes_give_the_gradients_of_one_with_each_matmul_once() -> None:
    stage = _Stage(0)
    stage.forward()
    grad_x, grads = stage.inputs()
    assert stage.matmuls == {"inputs": NUM_LAYERS}
    found = [grad_x, *stage.weight_gradients(grads)]
    assert stage.matmuls == {"inputs": NUM_LAYERS, "weights": NUM_LAYERS}
    joint = _Stage(0)
    joint.forward()
    assert _are_equal(found, joint.joint())
    torch.testing.assert_close(found, _expected(0), rtol=1e-12, atol=1e-12)


def test_a_pass_outside_the_contexts_wants_everything() -> None:
    stage = _Stage(0)
    stage.forward()
    stage.inputs()
    stage.matmuls.clear()
    stage.joint()
    assert stage.matmuls == {"inputs": NUM_LAYERS, "weights": NUM_LAYERS}


def test_functions_outside_any_split_want_everything() -> None:
    stage = _Stage(0)
    h = _Linear.apply(stage.x, stage.weights[0], stage.matmuls)
    with stage.split.only_inputs():
        grads = torch.autograd.grad(h.sum(), [stage.x, stage.weights[0]])
    assert stage.matmuls == {"inputs": 1, "weights": 1}
    assert len(grads) == 2


def test_backward_may_run_in_another_thread() -> None:
    stage = _Stage(0)
    stage.forward()
    with ThreadPoolExecutor(1) as other, stage.split.only_inputs():
        other.submit(torch.autograd.grad, stage.loss, stage.x).result()
    assert stage.matmuls == {"inputs": NUM_LAYERS}


def test_the_innermost_split_counts() -> None:
    outer, inner = SplitBackward(), SplitBackward()
    with outer.forward():
        before = gradients_wanted()
        with inner.forward():
            inside = gradients_wanted()
        after = gradients_wanted()
    outside = gradients_wanted()
    assert before is after
    with outer.only_weights(), inner.only_inputs():
        assert (before.inputs, before.weights) == (False, True)
        assert (inside.inputs, inside.weights) == (True, False)
        assert outside.inputs
        assert outside.weights


def test_stages_in_turn_and_in_threads_do_not_disturb_each_other() -> None:
    first, second = _Stage(1), _Stage(2)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(_Stage.forward, (first, second)))
        with first.split.only_weights():  # a pass of one stage within a pass of another
            grad_x, grads = second.inputs()
        assert second.matmuls == {"inputs": NUM_LAYERS}
        first_grad_x, first_grads = first.inputs()
        weights = threads.submit(second.weight_gradients, grads), threads.submit(first.weight_gradients, first_grads)
        second_weights, first_weights = (future.result() for future in weights)
    assert first.matmuls == second.matmuls == {"inputs": NUM_LAYERS, "weights": NUM_LAYERS}
    torch.testing.assert_close([first_grad_x, *first_weights], _expected(1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close([grad_x, *second_weights], _expected(2), rtol=1e-12, atol=1e-12)


def _fail() -> None:
    raise RuntimeError("failed")


def test_an_exception_restores_what_was_wanted() -> None:
    split = SplitBackward()
    with split.forward():
        wanted = gradients_wanted()
    for context in (split.forward, split.only_inputs, split.only_weights):
        with pytest.raises(RuntimeError, match="failed"), context():
            _fail()
        assert gradients_wanted() is not wanted
        assert wanted.inputs
        assert wanted.weights


def test_one_split_serves_all_microbatches_of_a_stage() -> None:
    stage = _Stage(0)
    stage.forward()
    earlier = stage.between, stage.loss
    stage.between = []
    stage.forward()
    stage.inputs()
    stage.between, stage.loss = earlier
    stage.inputs()
    assert stage.matmuls == {"inputs": 2 * NUM_LAYERS}


def test_recomputed_activations_keep_the_split() -> None:
    stage = _Stage(0)

    def block(x: Tensor) -> Tensor:
        return _Linear.apply(x, stage.weights[0], stage.matmuls).tanh()

    with stage.split.forward():
        h = checkpoint(block, stage.x, use_reentrant=False)
    with ThreadPoolExecutor(1) as other, stage.split.only_inputs():
        (grad_x,) = other.submit(lambda: torch.autograd.grad(h.sum(), stage.x)).result()
    assert stage.matmuls == {"inputs": 1}
    (expected,) = torch.autograd.grad((stage.x @ stage.weights[0].T).tanh().sum(), stage.x)
    assert _are_equal([grad_x], [expected])
