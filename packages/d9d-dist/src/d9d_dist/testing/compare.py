"""Comparison of what two layouts computed: full tensors under the names of the user's model, and where they part.

A norm over a whole tensor is what a wrong factor or a missing reduction moves, and what rounding does not.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import GetAttrKey, MappingKey, SequenceKey, tree_flatten_with_path, tree_map_only

from d9d_dist.errors import UserError
from d9d_dist.late_init import canonical_name

_NUM_SHOWN = 9


def full_tree(tree: Any) -> Any:
    """A copy of a tree on the CPU in which every DTensor is a full, plain tensor.

    Collective over the meshes of its DTensors: their ranks call it with equal trees. Partial sums are added up.

    Args:
        tree: A nest of dicts, lists and tuples; what is no tensor stays as it is.
    """
    return tree_map_only(torch.Tensor, _full, tree)


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """A model's parameters under their canonical names, as full tensors on the CPU. Collective, see `full_tree`."""
    return {canonical_name(name): _full(parameter) for name, parameter in model.named_parameters()}


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """A model's gradients under their parameters' canonical names, as full tensors on the CPU.

    Collective, see `full_tree`. Parameters without a gradient are left out, on all ranks of their mesh or on none.
    """
    return {
        canonical_name(name): _full(parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@dataclass(frozen=True, slots=True)
class Difference:
    """One place where two trees part.

    Attributes:
        path: Keys and indices that lead there, joined by dots.
        reason: What is different, in words.
        error: The relative error ||actual - expected|| / ||expected||, infinite where that cannot be said.
        index: The element that deviates most, where both sides are tensors of one shape.
        actual: Its value on the one side.
        expected: Its value on the other.
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
    """Assert that two trees hold the same tensors, each up to a relative error of its norm.

    Args:
        actual: A nest of dicts, lists and tuples of full tensors, numbers and other values; see `full_tree`.
        expected: The reference.
        rtol: The largest ||actual - expected|| / ||expected|| to let pass.
        atol: The largest ||actual - expected|| to let pass whatever the reference, which may be zero, or rounding only.

    Raises:
        AssertionError: If they part anywhere: names the first difference in the reference's order, the values there,
            and how many there are.
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

    The bound on an element's error is `multiple` times the larger of two roundings. One is the largest error of the
    peer's tensor at the same place. The other is the machine epsilon times the largest number in the whole tree: a
    tensor may be zero in exact arithmetic and then holds the rounding of what cancels.

    Args:
        actual: A nest of dicts, lists and tuples of floating-point tensors.
        exact: The same tensors in float64.
        peer: The same tensors as an independent implementation computes them, with the dtypes of `actual`.
        multiple: How many times the rounding an error may be.

    Raises:
        AssertionError: If the trees or the shapes differ, or a tensor has a larger error: names the first such tensor.
    """
    ours, theirs, right = _leaves(actual), _leaves(peer), _leaves(exact)
    assert ours.keys() == theirs.keys() == right.keys(), "the trees have different keys"
    largest = max(tensor.abs().max().item() for tensor in right.values())
    for path, tensor in right.items():
        rounding = torch.finfo(ours[path].dtype).eps * largest
        error, peers_error = ((each[path] - tensor).abs().max().item() for each in (ours, theirs))
        bound = multiple * max(rounding, peers_error)
        # Written so that a NaN fails.
        assert error <= bound, f"{'.'.join(path)}: the error is {error:.3g}, and the peer's {peers_error:.3g}"


def differences(actual: Any, expected: Any, *, rtol: float = 1e-9, atol: float = 1e-12) -> Iterator[Difference]:
    """Every place where two trees part, in the order of the reference; see `assert_trees_close`.

    Numbers and floating-point tensors are compared in float64, whatever their dtypes; integers, booleans and all other
    values must be equal. A NaN equals nothing, an infinity itself.
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
    whole = tensor.detach()
    return (whole.full_tensor() if isinstance(whole, DTensor) else whole).to("cpu", copy=True)


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
    # NaN sorts above all numbers, so the first element that is none counts as the largest deviation.
    flat = int(deviation.flatten().argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), actual.shape)) if actual.ndim else ()
    error = distance / norm if norm else float("inf")
    reason = f"relative error {error:.3g}" if norm else f"the reference is zero, and the norm here is {distance:.3g}"
    return Difference(path, reason, error, index, actual[index].item(), expected[index].item())


def _as_tensor(leaf: Any) -> torch.Tensor | None:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().cpu()
    if isinstance(leaf, bool | int | float | complex):
        return torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else None)
    return None


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
