"""Backward pass without autograd's engine, whose threads do not survive a fork."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import GraphExecGroup


def walk_backward(loss: Tensor) -> None:
    """Call the backward functions of a graph in order. Gradients of leaves are not summed, and hooks are not called.

    Gradients are disabled meanwhile, except in code that recomputes activations, which runs once for each of its calls.
    """
    root: Any = loss.grad_fn
    edges = _num_edges(root)
    grads: dict[Any, dict[int, Tensor]] = defaultdict(dict, {root: {0: torch.ones_like(loss)}})
    ready = [root]
    with torch.no_grad(), GraphExecGroup():
        while ready:
            node = ready.pop()
            for following, index, grad in _results(node, grads.pop(node, {})):
                if grad is not None:
                    # The operand may have been broadcast, or of another dtype.
                    variable = following._input_metadata[index]
                    own = grad.sum_to_size(tuple(variable.shape)).to(variable.dtype)
                    before = grads[following].get(index)
                    grads[following][index] = own if before is None else before + own
                edges[following] -= 1
                if not edges[following]:
                    ready.append(following)


def _num_edges(root: Any) -> Counter[Any]:
    """Return the number of edges that lead to each node of a graph."""
    edges, stack = Counter[Any](), [root]
    while stack:
        for following, _ in stack.pop().next_functions:
            if following is not None:
                if following not in edges:
                    stack.append(following)
                edges[following] += 1
    return edges


def _results(node: Any, given: dict[int, Tensor]) -> Iterator[tuple[Any, int, Tensor | None]]:
    """Yield the gradients that a node computes from those of some of its outputs, with the nodes that receive them."""
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    results: Any = [None] * len(edges)
    outputs = list(enumerate(node._input_metadata))
    if given and isinstance(node, BackwardCFunction):  # a custom function, whose missing gradients are zeros
        zeros = (torch.zeros(tuple(each.shape), dtype=each.dtype, device=each.device) for _, each in outputs)
        found = node.apply(*(given.get(index, zero) for (index, _), zero in zip(outputs, zeros, strict=True)))
        found = found if isinstance(found, tuple) else (found,)
        needed: Any = node.needs_input_grad
        results = [result for result, is_needed in zip(found, needed, strict=False) if is_needed]
    elif given and type(node).__name__ == "AccumulateGrad":
        node.variable.grad = given[0]
    elif given:
        found = node(*(given.get(index) for index, _ in outputs))
        found = found if isinstance(found, tuple) else (found,)
        results = [
            result for result, (following, _) in zip(found, node.next_functions, strict=True) if following is not None
        ]
    for (following, index), result in zip(edges, results, strict=True):
        yield following, index, result
