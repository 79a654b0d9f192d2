"""Preservation of a model's initial values while the model is parallelized.

A model built on the CPU has values before it has a layout. `move_to_meta` moves it to `meta`, as the `parallelize_*`
functions require; `place_values` then copies the values to every rank's shards, for any placements.
`d9d_dist.late_init` initializes models that are built on `meta`.
"""

import ctypes
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from d9d_dist._model_tensors import empty_on, named_tensors, replace_tensors
from d9d_dist.errors import UserError
from d9d_dist.late_init import canonical_name
from d9d_dist.shards import local_positions, local_tensor

_BLOCK_BYTES = 8 << 20


def built_values(model: nn.Module, *, ignore_meta: bool = False) -> dict[str, torch.Tensor]:
    """Return a CPU model's parameters and buffers by canonical name, detached. Tied tensors are returned once.

    Raises:
        UserError: If a tensor has no values: it is on `meta` (unless `ignore_meta`, which skips it), or its lazy module
            has not run yet.
    """
    found = {canonical_name(name): tensor for name, tensor in named_tensors(model)}
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

    Tied tensors stay tied. Shapes, strides, dtypes, `requires_grad` and module hooks are kept; gradients are freed.

    Raises:
        UserError: If values could not be restored later: two tensors overlap in memory, or a module also keeps a
            parameter in a plain list or dict.
    """
    _check_no_overlap(model)
    before = {id(tensor): canonical_name(name) for name, tensor in named_tensors(model)}
    for parameter in model.parameters():
        parameter.grad = None
    keep_alive = list(named_tensors(model))  # ids are unique only while the tensors are alive
    replace_tensors(model, lambda tensor: torch.empty_like(tensor, device="meta"))
    _check_no_stale_reference(model, before)
    del keep_alive


def move_values(model: nn.Module, device: torch.device) -> None:
    """Move a model to a device, in place. Tensors on `meta` become uninitialized tensors. Tied tensors stay tied."""
    replace_tensors(
        model, lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
    )


def place_values(
    models: Collection[nn.Module],
    layout: Mapping[str, torch.Tensor],
    values: Mapping[str, torch.Tensor] | None,
    *,
    device: torch.device,
) -> None:
    """Allocate parallelized stages that are on `meta`, and fill them with rank 0's values, in place.

    Collective over all ranks: an all-gather of 16 bytes per tensor, then a scatter or broadcast from rank 0 for each
    block of each tensor. A block has at most 8 MiB, or one row per rank if larger. A tensor whose rows are split over
    all ranks is scattered. Besides its own shards a rank holds one block at a time.

    Args:
        models: This rank's stages, parallelized: plain tensors and DTensors of any placements.
        layout: Tensors of the whole model that have values, on `meta`, by canonical name, in the same order on every
            rank. Other tensors of the stages are not initialized.
        values: Values of these tensors on rank 0; `None` on other ranks.
        device: Device of the parameters and buffers.
    """
    targets: dict[str, list[_Target]] = {name: [] for name in layout}
    with torch.no_grad():
        for model in models:
            replace_tensors(model, partial(empty_on, device))
            for name, tensor in named_tensors(model):
                if canonical_name(name) in targets:
                    targets[canonical_name(name)].append(_Target.of(tensor, name))
        needed = _gather_rows(targets.values(), device)
        for (name, whole), rows in zip(layout.items(), needed, strict=True):
            source = None if values is None else values[name]
            for begin, block in _blocks(whole, source, rows, device):
                for target in targets[name]:
                    _copy_part(target, block, begin)


class _Target(NamedTuple):
    """Tensor to fill: this rank's shard, and its positions in the full tensor for each dim (`local_positions`)."""

    local: torch.Tensor
    places: list[torch.Tensor]

    @classmethod
    def of(cls, tensor: torch.Tensor, name: str) -> "_Target":
        """Return the target for a tensor of a model."""
        return cls(local_tensor(tensor), local_positions(tensor, name))

    def rows(self) -> tuple[int, int]:
        """Return the begin and the end of the rows that the shard spans."""
        if not self.places:
            return 0, 1
        rows = self.places[0]
        return (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)


def _gather_rows(targets: Collection[Sequence[_Target]], device: torch.device) -> list[list[tuple[int, int]]]:
    """Return, for each tensor, the begin and the end of the rows that each rank needs."""
    mine = []
    for group in targets:
        begins, ends = zip(*(target.rows() for target in group), strict=True) if group else ((0,), (0,))
        mine.append((min(begins), max(ends)))
    if dist.get_world_size() == 1:
        return [[rows] for rows in mine]
    rows = torch.tensor(mine, dtype=torch.int64, device=device).view(-1, 2)
    every = rows.new_empty(dist.get_world_size() * len(rows), 2)
    dist.all_gather_into_tensor(every, rows)
    return every.view(dist.get_world_size(), -1, 2).transpose(0, 1).tolist()


def _blocks(
    whole: torch.Tensor, source: torch.Tensor | None, needed: Sequence[tuple[int, int]], device: torch.device
) -> Iterator[tuple[int, torch.Tensor]]:
    """Send blocks of rows of a tensor from rank 0; yield the first row index and the rows of each received block.

    A block is valid until the next iteration. `whole` is the full tensor on `meta`, `source` its values on rank 0,
    `needed` the begin and the end of each rank's rows.
    """
    longest = max(end - begin for begin, end in needed)
    if not whole.numel() or not longest:
        return
    if not whole.ndim:
        whole, source = whole.view(1), None if source is None else source.view(1)
    is_scattered = longest * len(needed) <= 1.25 * len(whole)
    begins: list[int] = [begin for begin, _ in needed] if is_scattered else [0]
    num_rows = longest if is_scattered else len(whole)
    step = min(max(_BLOCK_BYTES // (whole[0].nbytes * len(begins)), 1), num_rows)
    buffer = None if source is not None else whole.new_empty((step, *whole.shape[1:]), device=device)
    for offset in range(0, num_rows, step):
        size = min(step, num_rows - offset)
        # The last rows of a rank with fewer rows than others are sent together with rows of another rank.
        starts = [min(begin + offset, len(whole) - size) for begin in begins]
        parts = [] if source is None else [source[start : start + size].to(device).contiguous() for start in starts]
        place = dist.get_rank() if is_scattered else 0
        block = parts[place] if buffer is None else buffer[:size]
        # As bytes: gloo supports neither float8 nor complex dtypes.
        raw = block.view(-1).view(torch.uint8)
        if is_scattered and len(needed) > 1:
            dist.scatter(raw, [part.view(-1).view(torch.uint8) for part in parts] or None, src=0)
        elif len(needed) > 1:
            dist.broadcast(raw, src=0)
        yield starts[place], block


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
    lines = []
    for module_name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in {"_parameters", "_buffers", "_modules"}:
                continue
            lines += [
                f"  {canonical_name(f'{module_name}.' if module_name else '')}{attribute} holds {before[id(leaf)]}"
                for leaf in pytree.tree_leaves(value)
                if id(leaf) in before
            ]
    if lines:
        raise UserError(
            "modules keep parameters in plain lists or dicts:\n"
            + "\n".join(lines)
            + "\nOn several ranks sharded parameters replace the registered ones, and those in lists or dicts would "
            "not be trained. Use nn.ParameterList, nn.ParameterDict, or access the parameter by its registered "
            "attribute."
        )
