"""Traversal of trees along a spec of the same nesting, with an error that names the path of a mismatch."""

from collections.abc import Callable, Sequence
from reprlib import repr as shorten
from typing import Any

import torch
from torch.utils._pytree import KeyEntry, KeyPath, TreeSpec, keystr, tree_flatten_with_path, tree_unflatten

from d9d_dist.errors import UserError


def map_along(
    function: Callable[[KeyPath, Any, Sequence[Any]], Any],
    spec: Any,
    trees: Sequence[Any],
    *,
    is_spec_leaf: Callable[[Any], bool],
    expected: str,
) -> Any:
    """Call a function at each leaf of a spec and return the tree of its results.

    `function` gets the path, the leaf of the spec and one node (leaf or subtree) per tree. Each tree has at least the
    nesting of the spec. `expected` describes valid leaves for the message. Raises `UserError` with the path if a tree
    does not match the spec or a leaf of the spec is invalid.
    """

    def visit(path: KeyPath, spec: Any, trees: Sequence[Any]) -> Any:
        if is_spec_leaf(spec):
            return function(path, spec, trees)
        spec_children, _ = _children(spec)
        if spec_children is None:
            raise UserError(f"got {spec!r} in the spec at {where(path)}; expected {expected}.")
        children_of = [_matching_children(path, spec, spec_children, tree) for tree in trees]
        _, structure = _children(trees[0])
        keys = [key for key in children_of[0] if key in spec_children]
        visited = [visit((*path, key), spec_children[key], [children[key] for children in children_of]) for key in keys]
        return tree_unflatten(visited, structure)

    return visit((), spec, trees)


def where(path: KeyPath) -> str:
    """Format a path for an error message."""
    return keystr(path) or "the root"


def describe(node: Any) -> str:
    """Describe a node for an error message."""
    children, _ = _children(node)
    if isinstance(node, torch.Tensor):
        return f"a tensor of shape {tuple(node.shape)}"
    if children is None:
        return f"the {type(node).__name__} {shorten(node)}"
    if isinstance(node, dict):
        return f"a dict with the keys {', '.join(map(repr, node)) or '(none)'}"
    return f"a {type(node).__name__} of {len(children)}"


def _matching_children(path: KeyPath, spec: Any, spec_children: dict[KeyEntry, Any], tree: Any) -> dict[KeyEntry, Any]:
    children, _ = _children(tree)
    if children is None or type(tree) is not type(spec) or children.keys() != spec_children.keys():
        raise UserError(
            f"the tree and the spec differ at {where(path)}: got {describe(tree)} in the tree, and {describe(spec)} in "
            "the spec; expected the same nesting. A leaf of the spec may apply to a whole subtree."
        )
    return children


def _children(node: Any) -> tuple[dict[KeyEntry, Any] | None, TreeSpec]:
    """Return the children of a node by key (`None` for a leaf) and the spec to rebuild the node."""
    items, structure = tree_flatten_with_path(node, is_leaf=lambda child: child is not node)
    if len(items) == 1 and not items[0][0]:
        return None, structure
    return {path[0]: child for path, child in items}, structure
