"""Comparison of the results of two layouts: full tensors under canonical names, and their differences.

Tensors are compared by the norm of their difference. That norm is large for a wrong factor or a missing reduction,
and small for rounding errors.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import GetAttrKey, MappingKey, SequenceKey, tree_flatten_with_path, tree_map_only

from d9d_dist.errors import UserError
from d9d_dist.shards import full_tensor
from d9d_dist.values._model_tensors import canonical_name

_NUM_SHOWN = 9


def full_tree(tree: Any) -> Any:
    """Return a copy of a tree on the CPU in which every DTensor is a full, plain tensor.

    Collective over the meshes of the DTensors: their ranks must pass trees of the same structure. Partial tensors are
    summed. Leaves that are not tensors are not changed.
    """
    return tree_map_only(torch.Tensor, _full, tree)


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's parameters by canonical name, as full tensors on the CPU. Collective, see `full_tree`."""
    return {canonical_name(name): _full(parameter) for name, parameter in model.named_parameters()}


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's gradients by canonical name, as full tensors on the CPU. Collective, see `full_tree`.

    Parameters without a gradient are skipped; a gradient must be missing on all ranks of the mesh or on none.
    """
    return {
        canonical_name(name): _full(parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference between two trees.

    Attributes:
        path: Keys and indices of the node, joined by dots.
        error: Relative error ||actual - expected|| / ||expected||; infinite if undefined.
        index: Index of the element with the largest deviation, whose values are `actual` and `expected`; `None` if the
            leaves are not tensors of one shape.
    """

    path: str
    reason: str
    error: float = float("inf")
    index: tuple[int, ...] | None = None
    actual: Any = None
    expected: Any = None

    def __str__(self) -> str:
        if self.index is None:
            return f"{self.path}: {self.reason}"
        where = f"the largest deviation is at index {self.index}: " if self.index else ""
        return f"{self.path}: {self.reason}; {where}got {self.actual!r}, expected {self.expected!r}"


def assert_trees_close(actual: Any, expected: Any, *, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    """Assert that two trees hold the same tensors within a tolerance on each tensor's norm.

    Args:
        actual: A tree of dicts, lists and tuples with full tensors, numbers and other values; see `full_tree`.
        expected: The reference.
        rtol: Maximum ||actual - expected|| / ||expected||.
        atol: Maximum ||actual - expected|| for references that are zero or contain only rounding errors.

    Raises:
        AssertionError: If the trees differ. The message states the first difference in the reference's order and the
            number of differences.
        UserError: If a leaf is a DTensor.
    """
    found = list(differences(actual, expected, rtol=rtol, atol=atol))
    if not found:
        return
    num_leaves = len(_leaves(expected))
    others = "; ".join(
        difference.path if difference.index is not None else str(difference) for difference in found[1:_NUM_SHOWN]
    )
    more = f" and {len(found) - _NUM_SHOWN} more" if len(found) > _NUM_SHOWN else ""
    raise AssertionError(
        f"{len(found)} differences, of {num_leaves} leaves expected (rtol = {rtol:g}, atol = {atol:g}). First: "
        f"{found[0]}." + (f" Then: {others}{more}." if others else "")
    )


def assert_rounds_like(actual: Any, exact: Any, *, peer: Any, multiple: float = 8.0) -> None:
    """Assert that low-precision tensors are about as exact as those of an independent implementation.

    The bound on an element's error is `multiple` times the larger of two rounding errors. One is the largest error of
    the peer's tensor at the same path. The other is the machine epsilon times the largest number in the whole tree. A
    tensor that is zero in exact arithmetic has only rounding errors of terms that cancel.

    Args:
        actual: A tree of dicts, lists and tuples with floating-point tensors.
        exact: The same tensors in float64.
        peer: The same tensors of an independent implementation, with the dtypes of `actual`.
        multiple: Ratio of the bound to the rounding error.

    Raises:
        AssertionError: If the trees or shapes differ, or a tensor exceeds its bound; names the first such tensor.
    """
    ours, theirs, right = _leaves(actual), _leaves(peer), _leaves(exact)
    assert ours.keys() == theirs.keys() == right.keys(), "the trees have different keys"
    for path, tensor in right.items():
        assert ours[path].shape == tensor.shape, f"{'.'.join(path)}: the shapes differ"
    right = {path: tensor for path, tensor in right.items() if tensor.numel()}
    largest = max((tensor.abs().max().item() for tensor in right.values()), default=0.0)
    for path, tensor in right.items():
        rounding = torch.finfo(ours[path].dtype).eps * largest
        error, peers_error = ((each[path] - tensor).abs().max().item() for each in (ours, theirs))
        bound = multiple * max(rounding, peers_error)
        # A NaN fails the assertion.
        assert error <= bound, (
            f"{'.'.join(path)}: the error is {error:.3g}, that of the reference implementation {peers_error:.3g}"
        )


def differences(actual: Any, expected: Any, *, rtol: float = 1e-9, atol: float = 1e-12) -> Iterator[Difference]:
    """Yield all differences of two trees, in the order of the reference; see `assert_trees_close`.

    Numbers and floating-point tensors are compared in float64 for every dtype. Integers, booleans and other values must
    be equal. A NaN equals nothing; an infinity equals itself.
    """
    ours, theirs = _leaves(actual), _leaves(expected)
    for path, reference in theirs.items():
        if path not in ours:
            yield Difference(".".join(path), "missing")
        elif (difference := _compare(".".join(path), ours[path], reference, rtol=rtol, atol=atol)) is not None:
            yield difference
    for path in ours:
        if path not in theirs:
            yield Difference(".".join(path), "not expected")


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return full_tensor(tensor).to("cpu", copy=True)


def _leaves(tree: Any) -> dict[tuple[str, ...], Any]:
    leaves, _ = tree_flatten_with_path(tree)
    return {tuple(_key_text(key) for key in path): leaf for path, leaf in leaves}


def _key_text(key: Any) -> str:
    match key:
        case MappingKey(name) | GetAttrKey(name):
            return str(name)
        case SequenceKey(index):
            return str(index)
        case _:
            return str(key)


def _compare(path: str, actual: Any, expected: Any, *, rtol: float, atol: float) -> Difference | None:
    if isinstance(actual, DTensor) or isinstance(expected, DTensor):
        raise UserError(f"{path} is a DTensor; expected full tensors. Pass the tree through full_tree on every rank.")
    ours, theirs = _as_tensor(actual), _as_tensor(expected)
    if ours is None or theirs is None:
        same = ours is theirs and bool(actual == expected)
        return None if same else Difference(path, f"got {actual!r}, expected {expected!r}")
    if ours.shape != theirs.shape:
        return Difference(path, f"got the shape {tuple(ours.shape)}, expected {tuple(theirs.shape)}")
    return _compare_tensors(path, ours, theirs, rtol=rtol, atol=atol)


def _compare_tensors(
    path: str, actual: torch.Tensor, expected: torch.Tensor, *, rtol: float, atol: float
) -> Difference | None:
    unequal = actual != expected
    if not unequal.any():
        return None
    wide = torch.complex128 if actual.is_complex() or expected.is_complex() else torch.float64
    deviation = torch.where(unequal, actual.to(wide) - expected.to(wide), 0).abs()
    distance = torch.linalg.vector_norm(deviation).item()
    norm = torch.linalg.vector_norm(expected.to(wide)[expected.isfinite()]).item()
    if _is_inexact(actual) and _is_inexact(expected) and distance <= max(rtol * norm, atol):
        return None
    # argmax treats NaN as the maximum, so the first NaN counts as the largest deviation.
    flat = int(deviation.flatten().argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), actual.shape)) if actual.ndim else ()
    error = distance / norm if norm else float("inf")
    reason = (
        f"relative error {error:.3g}"
        if norm
        else f"the expected tensor is zero, the norm of the actual one is {distance:.3g}"
    )
    return Difference(path, reason, error, index, actual[index].item(), expected[index].item())


def _as_tensor(leaf: Any) -> torch.Tensor | None:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().cpu()
    if isinstance(leaf, bool | int | float | complex):
        return torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else None)
    return None


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
