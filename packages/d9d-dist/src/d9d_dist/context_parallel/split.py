"""Split of rows over context-parallel ranks such that all ranks have equal work under a causal mask."""

from functools import partial
from typing import Literal, TypeVar, final

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import KeyPath, keystr, tree_map_with_path

from d9d_dist.collectives._mesh_axes import only_axis
from d9d_dist.collectives.differentiable import gather_from_axis
from d9d_dist.context_parallel._chunk_order import rank_chunks, to_natural_order
from d9d_dist.errors import UserError

Tree = TypeVar("Tree")


@final
class ContextSplit:
    """Load-balanced causal split of Llama 3 (arXiv:2407.21783, section 3.3.2), over a 1-D mesh.

    A row is cut into 2R equal chunks for R ranks; rank r holds chunks r and 2R-1-r, in this order. On a mesh of one
    rank `split` and `join` return their argument. Raises `UserError` unless the mesh is 1-D.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        only_axis(mesh, example="cp")
        self.mesh = mesh

    def split(self, tree: Tree, *, dim: int = 1) -> Tree:
        """Return this rank's part of every tensor of a tree. No collectives, no host-device synchronization.

        Args:
            tree: Whole rows, equal on all ranks: token ids, labels, position ids, document ids, masks. Labels must be
                shifted before the split, not after. Leaves that are not tensors are not changed.
            dim: Position dim of every tensor.

        Raises:
            UserError: If a tensor lacks the dim, or the size of the dim is not a multiple of 2R; the message has the
                tensor's path in the tree.
        """
        if self.mesh.size() == 1:
            return tree
        return tree_map_with_path(partial(self._part, dim), tree)

    def join(self, tree: Tree, *, dim: int = 1, gradient: Literal["equal", "partial"] = "equal") -> Tree:
        """Join the parts of every tensor of a tree into whole rows; the inverse of `split`.

        Collective: one all-gather for each tensor. Backward depends on how the ranks use the rows:

        - `"equal"`: all ranks compute the same from the rows. Each rank takes its part of its own gradient, without a
          collective. Parameters used after the join have the full gradient on every rank, so their gradients must not
          be summed over these ranks.
        - `"partial"`: ranks compute different values from the rows, and the loss is their sum over ranks. Gradients are
          reduce-scattered.

        Args:
            tree: This rank's parts, of the same shapes on all ranks. Leaves that are not tensors are not changed.
            dim: Position dim of every tensor.
            gradient: `"equal"` or `"partial"`, as above.

        Raises:
            UserError: If a tensor lacks the dim, or the size of the dim is odd; the message has the tensor's path in
                the tree.
        """
        if self.mesh.size() == 1:
            return tree
        return tree_map_with_path(partial(self._rows, dim, gradient), tree)

    def positions(self, length: int) -> Tensor:
        """Return the positions of this rank's tokens in the whole row: [1, length / R], int64, on the mesh's device.

        Use the positions as position ids for batches without position ids. `length` is the length of the whole row.
        Raises `UserError` if the length is not a multiple of 2R.
        """
        device = torch.device(self.mesh.device_type)
        if self.mesh.size() == 1:
            return torch.arange(length, device=device).unsqueeze(0)
        size = self._chunk_size(length, of="a row")
        starts = [chunk * size for chunk in self._chunks()]
        return torch.cat([torch.arange(start, start + size, device=device) for start in starts]).unsqueeze(0)

    def _chunks(self) -> tuple[int, int]:
        return rank_chunks(self.mesh.get_local_rank(), self.mesh.size())

    def _part(self, dim: int, path: KeyPath, leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        size = self._chunk_size(_size(leaf, dim, path), of=_name(path))
        first, second = self._chunks()
        if second == first + 1:
            return leaf.narrow(dim, first * size, 2 * size)
        return torch.cat([leaf.narrow(dim, chunk * size, size) for chunk in (first, second)], dim)

    def _rows(self, dim: int, gradient: Literal["equal", "partial"], path: KeyPath, leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        num_ranks = self.mesh.size()
        if _size(leaf, dim, path) % 2:
            raise UserError(
                f"{_name(path)} has length {leaf.shape[dim]}; expected a multiple of 2: each rank has two equal "
                "chunks of a sequence. Join the result of `split`."
            )
        return to_natural_order(gather_from_axis(leaf, self.mesh, dim=dim, gradient=gradient), num_ranks, dim=dim)

    def _chunk_size(self, length: int, *, of: str) -> int:
        num_chunks = 2 * self.mesh.size()
        size, rest = divmod(length, num_chunks)
        if rest:
            raise UserError(
                f"{of} has length {length}; expected a multiple of {num_chunks}, for two chunks per rank of the "
                f"{self.mesh.size()} context-parallel ranks. Pad sequences, with ignored labels, to "
                f"{(size + 1) * num_chunks}."
            )
        return size


def _name(path: KeyPath) -> str:
    return f"the tensor {keystr(path)}" if path else "the tensor"


def _size(tensor: Tensor, dim: int, path: KeyPath) -> int:
    if not -tensor.ndim <= dim < tensor.ndim:
        raise UserError(
            f"{_name(path)} has the shape {tuple(tensor.shape)}; expected the sequence in dim {dim}. "
            "Do not pass it to `split`, or add that dim."
        )
    return tensor.shape[dim]
