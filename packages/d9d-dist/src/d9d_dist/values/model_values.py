"""Preservation of a model's initial values while the model is parallelized.

A model built on the CPU has values before it has a layout. `move_to_meta` moves it to `meta`, as the `parallelize_*`
functions require; `place_values` then copies the values to every rank's shards, for any placements.
`d9d_dist.values.late_init` initializes models that are built on `meta`.
"""

import ctypes
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import prod
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.jit import ScriptModule
from torch.utils import _pytree as pytree

from d9d_dist.errors import UserError
from d9d_dist.shards import local_positions, local_tensor
from d9d_dist.values._model_tensors import canonical_name, empty_on, named_tensors, replace_tensors

_BLOCK_BYTES = 8 << 20


def built_values(model: nn.Module, *, ignore_meta: bool = False) -> dict[str, torch.Tensor]:
    """Return a CPU model's parameters and buffers by canonical name, detached. Tied tensors are returned once.

    Raises:
        UserError: If a tensor has no values, because it is on `meta` (skipped with `ignore_meta`) or belongs to a lazy
            module that has not run yet. Also if a tensor is sparse.
    """
    found = {canonical_name(name): tensor for name, tensor in named_tensors(model)}
    if sparse := [name for name, tensor in found.items() if tensor.layout != torch.strided]:
        raise UserError(
            f"{', '.join(sparse)} are sparse tensors; expected dense tensors, because checkpoints and shards do not "
            "support sparse layouts. Register the indices and values as dense buffers, and create the sparse tensor in "
            "forward."
        )
    if ignore_meta:
        found = {name: tensor for name, tensor in found.items() if not tensor.is_meta}
    empty = [name for name, tensor in found.items() if nn.parameter.is_lazy(tensor) or tensor.is_meta]
    if empty:
        raise UserError(
            f"the model was built without values for {', '.join(empty)}; expected real tensors. Build it on the CPU, "
            "and run lazy modules once; or set late_init=True, which initializes a model on `meta` with "
            "reset_parameters."
        )
    return {name: tensor.detach() for name, tensor in found.items()}


def digest_values(values: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return a CRC-32 of the bytes of each tensor; equal tensors have equal digests on every rank."""
    return {name: _crc(tensor) for name, tensor in values.items()}


def move_to_meta(model: nn.Module) -> None:
    """Replace every parameter and buffer by a tensor on `meta`, in place.

    Tied tensors stay tied. Shapes, strides, dtypes, `requires_grad`, Python attributes of parameters and module hooks
    are kept; gradients are freed.

    Raises:
        UserError: If values could not be restored later: two tensors overlap in memory, or a module also keeps a
            tensor in a plain list or dict, a view, or a function's closure. Also if hooks of parameters would be lost,
            or a module is a ScriptModule.
    """
    _check_replaceable(model)
    _check_no_overlap(model)
    for parameter in model.parameters():
        parameter.grad = None
    # The storages are kept, because addresses are unique only while they are alive.
    built = [(canonical_name(name), tensor.untyped_storage()) for name, tensor in named_tensors(model)]
    replace_tensors(model, lambda tensor: torch.empty_like(tensor, device="meta"))
    _check_no_stale_reference(model, {storage._cdata: name for name, storage in built})


def move_values(model: nn.Module, device: torch.device) -> None:
    """Move a model to a device, in place. Tensors on `meta` become uninitialized tensors. Tied tensors stay tied.

    Expanded views and tensors of the inference mode become copies, which a restore of buffers and a load can write to.
    """
    replace_tensors(model, partial(_writable_on, device))


def _writable_on(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return torch.empty_like(tensor, device=device)
    is_strided = tensor.layout == torch.strided
    is_expanded = is_strided and any(
        not by and size > 1 for by, size in zip(tensor.stride(), tensor.shape, strict=True)
    )
    return tensor.to(device, copy=True).contiguous() if is_expanded or tensor.is_inference() else tensor.to(device)


def place_values(
    models: Collection[nn.Module],
    layout: Mapping[str, torch.Tensor],
    build: Callable[[], Mapping[str, torch.Tensor]] | None,
    *,
    device: torch.device,
) -> None:
    """Allocate parallelized stages that are on `meta`, and fill them with rank 0's values, in place. Collective.

    Rank 0 sends blocks of at most 8 MiB, or one row per rank if larger. This takes an all-gather of 16 bytes per
    tensor, then a scatter or broadcast for each block. A tensor whose rows are split over all ranks is scattered.
    Besides its own shards a rank holds one block at a time.

    Args:
        models: This rank's stages, parallelized: plain tensors and DTensors of any placements.
        layout: Tensors of the whole model that have values, on `meta`, by canonical name, in the same order on every
            rank. Other tensors of the stages are not initialized.
        build: Function that returns the values of these tensors, called on rank 0; `None` on other ranks.
        device: Device of the parameters and buffers.
    """
    targets: dict[str, list[_Target]] = {name: [] for name in layout}
    with torch.no_grad():
        for model in models:
            replace_tensors(model, partial(empty_on, device))
            for name, tensor in named_tensors(model):
                if canonical_name(name) in targets:
                    targets[canonical_name(name)].append(_Target.of(tensor, name))
        values = None if build is None else build()
        rows = _gather_rows(list(targets.values()), device)
        for (name, whole), needed in zip(layout.items(), rows, strict=True):
            _transfer(targets[name], whole, needed, None if values is None else values[name], device)


class _Target(NamedTuple):
    """Tensor to fill: this rank's shard, and its positions in the full tensor for each dim (`local_positions`)."""

    local: torch.Tensor
    places: list[torch.Tensor]

    @classmethod
    def of(cls, tensor: torch.Tensor, name: str) -> "_Target":
        """Return the target for a tensor of a model."""
        return cls(local_tensor(tensor), local_positions(tensor, name))

    def rows(self) -> tuple[int, int]:
        """Return the range (start, end) of the rows that the shard spans."""
        if not self.places:
            return 0, 1
        rows = self.places[0]
        return (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)


def _rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with at least one dim."""
    return tensor if tensor.ndim else tensor.view(1)


def _gather_rows(targets: Collection[Sequence[_Target]], device: torch.device) -> list[list[tuple[int, int]]]:
    """Return the range (start, end) of the rows that each rank needs, per tensor. Collective: one all-gather."""
    mine = []
    for group in targets:
        begins, ends = zip(*(target.rows() for target in group), strict=True) if group else ((0,), (0,))
        mine.append((min(begins), max(ends)))
    if not mine or dist.get_world_size() == 1:
        return [[rows] for rows in mine]
    rows = torch.tensor(mine, dtype=torch.int64, device=device).view(-1, 2)
    every = rows.new_empty(dist.get_world_size() * len(rows), 2)
    dist.all_gather_into_tensor(every, rows)
    return every.view(dist.get_world_size(), -1, 2).transpose(0, 1).tolist()


def _transfer(
    targets: Sequence[_Target],
    whole: torch.Tensor,
    needed: Sequence[tuple[int, int]],
    source: torch.Tensor | None,
    device: torch.device,
) -> None:
    """Send a tensor, `source` on rank 0, by blocks of rows, and copy the received rows into this rank's targets.

    `whole` is the full tensor on `meta`; `needed` has the range (start, end) of each rank's rows.
    """
    longest = max(end - begin for begin, end in needed)
    if not whole.numel() or not longest:
        return
    num_rows, *row_shape = _rows_of(whole).shape
    is_scattered = longest * len(needed) <= 1.25 * num_rows
    begins: list[int] = [begin for begin, _ in needed] if is_scattered else [0]
    num_sent = longest if is_scattered else num_rows
    row_bytes = prod(row_shape) * whole.itemsize
    step = min(max(_BLOCK_BYTES // (row_bytes * len(begins)), 1), num_sent)
    for offset in range(0, num_sent, step):
        size = min(step, num_sent - offset)
        # For a rank with fewer rows than others, the last message also contains rows of another rank.
        starts = [min(begin + offset, num_rows - size) for begin in begins]
        parts = None
        if source is not None:
            rows = _rows_of(source)
            parts = [rows[start : start + size].to(device).contiguous() for start in starts]
        block = whole.new_empty((size, *row_shape), device=device)
        _send(parts, block, is_scattered=is_scattered)
        for target in targets:
            _copy_part(target, block, starts[dist.get_rank() if is_scattered else 0])


def _send(parts: Sequence[torch.Tensor] | None, block: torch.Tensor, *, is_scattered: bool) -> None:
    """Scatter rank 0's `parts` to `block` on each rank, or broadcast the only part."""

    def as_bytes(tensor: torch.Tensor) -> torch.Tensor:  # gloo supports neither float8 nor complex dtypes
        return tensor.view(-1).view(torch.uint8)

    if is_scattered and dist.get_world_size() > 1:
        dist.scatter(as_bytes(block), None if parts is None else [as_bytes(part) for part in parts], src=0)
        return
    if parts is not None:
        block.copy_(parts[0])
    if dist.get_world_size() > 1:
        dist.broadcast(as_bytes(block), src=0)


def _copy_part(target: _Target, block: torch.Tensor, begin: int) -> None:
    """Copy this rank's shard of a block of rows into a target."""
    if not target.places:
        target.local.copy_(block[0])
        return
    rows, *columns = target.places
    mine = torch.searchsorted(rows, torch.tensor([begin, begin + len(block)]))
    start, stop = mine.tolist()
    taken = rows[start:stop] - begin
    if not len(taken):
        return
    is_contiguous = int(taken[-1]) - int(taken[0]) + 1 == len(taken)
    part = block[int(taken[0]) : int(taken[-1]) + 1] if is_contiguous else block[taken.to(block.device)]
    for dim, places in enumerate(columns, start=1):
        if len(places) < block.shape[dim]:
            part = part.index_select(dim, places.to(block.device))
    target.local[start:stop].copy_(part)


def _crc(tensor: torch.Tensor) -> int:
    whole = tensor.cpu().contiguous()  # the variable keeps the memory alive during the read
    return zlib.crc32((ctypes.c_char * whole.nbytes).from_address(whole.data_ptr())) if whole.nbytes else 0


def _check_replaceable(model: nn.Module) -> None:
    scripted = [canonical_name(name) for name, module in model.named_modules() if isinstance(module, ScriptModule)]
    if scripted:
        raise UserError(
            f"{', '.join(name or 'the model' for name in scripted[:1])} is a module of torch.jit; expected Python "
            "modules, because sharded parameters cannot replace those of a scripted module. Use the original Python "
            "module."
        )
    hooked = [
        canonical_name(name)
        for name, parameter in model.named_parameters()
        if any((parameter._backward_hooks, parameter._post_accumulate_grad_hooks))
    ]
    if hooked:
        raise UserError(
            f"{', '.join(hooked)} have hooks (register_hook); expected none, because sharded parameters replace the "
            "original ones and have no such hooks. Change the gradients in forward, or in a handler of GradientsReady."
        )


def _check_no_overlap(model: nn.Module) -> None:
    ranges: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in named_tensors(model):
        if not tensor.numel() or tensor.is_meta:
            continue
        last = sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = int(tensor.storage_offset()) * tensor.element_size()
        end = start + (last + 1) * tensor.element_size()
        ranges.setdefault(tensor.untyped_storage().data_ptr(), []).append((start, end, canonical_name(name)))
    for found in ranges.values():
        found.sort()
        for (_, end, first), (start, _, second) in pairwise(found):
            if start < end:
                raise UserError(
                    f"{first} and {second} are views of the same memory; expected separate tensors, or one tensor "
                    "registered under both names. Overlapping views cannot be kept equal on several ranks. "
                    "Register one of them, and compute the other in forward."
                )


def _check_no_stale_reference(model: nn.Module, before: Mapping[int, str]) -> None:
    """Raise `UserError` if a module's attribute or function holds a storage in `before`: names by storage address."""
    lines = []
    for module_name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in {"_parameters", "_buffers", "_modules"}:
                continue
            lines += [
                f"  {canonical_name(f'{module_name}.' if module_name else '')}{attribute} holds {before[storage]}"
                for leaf in _tensors_of(value)
                if (storage := leaf.untyped_storage()._cdata) in before
            ]
    if lines:
        raise UserError(
            "modules keep parameters or buffers outside of their registries, such as in lists, dicts, views or "
            "functions:\n"
            + "\n".join(lines)
            + "\nOn several ranks, sharded parameters replace only the registered ones; the others would not be "
            "trained. Use nn.ParameterList, nn.ParameterDict, or access the tensor by its registered attribute in "
            "forward."
        )


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the strided tensors of a tree, including those in closures of functions and in arguments of partials."""
    for leaf in pytree.tree_leaves(value):
        match leaf:
            case torch.Tensor():
                if type(leaf) in {torch.Tensor, nn.Parameter} and leaf.layout == torch.strided:
                    yield leaf
            case FunctionType():
                captured = [_contents(cell) for cell in leaf.__closure__ or ()]
                yield from _tensors_of([each for each in captured if not isinstance(each, FunctionType)])
            case partial():
                yield from _tensors_of([*leaf.args, *leaf.keywords.values()])


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # The variable is not assigned yet.
        return None
