import torch
from torch import Tensor

from d9d_dist.trees import ScalarTree, TensorTree, Tree


def _count(tree: Tree[Tensor | float | None]) -> int:
    """Count the tensors of a tree. The type checker, which also checks this file, must accept the types."""
    if isinstance(tree, Tensor):
        return 1
    if isinstance(tree, dict):
        return sum(_count(child) for child in tree.values())
    if isinstance(tree, list | tuple):
        return sum(_count(child) for child in tree)
    return 0


def test_nested_containers_are_trees() -> None:
    plain: dict[str, Tensor] = {"x": torch.zeros(1)}
    tensors: TensorTree = {"a": [torch.zeros(1), (torch.zeros(2), plain)]}
    scalars: ScalarTree = [1, {"name": "x", 2: (None, 0.5)}]
    mixed: Tree[Tensor | float | None] = {"a": [torch.zeros(1), 1.0, None], "b": (plain,)}
    assert _count(mixed) == 2
    assert isinstance(tensors, dict)
    assert isinstance(scalars, list)
