"""Preservation of a model's initial values while the model is parallelized.

A model built on the CPU has values before it has a layout. `move_to_meta` moves it to `meta`, as the `parallelize_*`
functions require; `place_values` then copies to every rank its shards of the values, for any placements. Models that
are built on `meta` are initialized by `d9d_dist.late_init` instead.
"""

import ctypes
import zlib
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from d9d_dist._model_tensors import empty_on, named_tensors, replace_tensors
from d9d_dist.errors import UserError
from d9d_dist.late_init import canonical_name
from d9d_dist.shards import local_positions

_BLOCK_BYTES = 64 << 20


def built_values(model: nn.Module, *, ignore_meta: bool = False) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a model by canonical name, detached. Tied tensors are returned once.

    Args:
        model: The model, on the CPU.
        ignore_meta: True to skip tensors on `meta` instead of raising.

    Raises:
        UserError: If a tensor has no values: it is on `meta`, or its lazy module has not run yet.
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
        UserError: If values could not be restored later: two tensors overlap in memory, or a module has a parameter in
            a plain list or dict, where it cannot be replaced.
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

    Collective over all ranks: a broadcast from rank 0 for each block of at most 64 MiB of each tensor (or one row, if
    larger). Apart from its own shards a rank holds one block at a time.

    Args:
        models: This rank's stages, parallelized: plain tensors and DTensors of any placements.
        layout: The tensors of the whole model that have values, on `meta`, by canonical name, in the same order on
            every rank. Other tensors of the stages are not initialized.
        values: The values of these tensors on rank 0; None on other ranks.
        device: Device of the parameters and buffers.
    """
    targets: dict[str, list[torch.Tensor]] = {}
    for model in models:
        replace_tensors(model, partial(empty_on, device))
        for name, tensor in named_tensors(model):
            targets.setdefault(canonical_name(name), []).append(tensor)
    with torch.no_grad():
        for name, whole in layout.items():
            source = None if values is None else values[name]
            for begin, block in _broadcast_blocks(whole, source, device):
                for target in targets.get(name, ()):
                    _copy_part(target, block, begin, name)


def _broadcast_blocks(
    whole: torch.Tensor, source: torch.Tensor | None, device: torch.device
) -> Iterator[tuple[int, torch.Tensor]]:
    """Broadcast rank 0's values of a tensor in blocks of rows; yield each block and the index of its first row."""
    num_rows = whole.shape[0] if whole.ndim else 1
    row_bytes = whole.nbytes // max(num_rows, 1)
    rows = max(_BLOCK_BYTES // max(row_bytes, 1), 1)
    for begin in range(0, num_rows if whole.numel() else 0, rows):
        end = min(begin + rows, num_rows)
        if source is not None:
            block = (source[begin:end] if whole.ndim else source).to(device).contiguous()
        else:
            shape = (end - begin, *whole.shape[1:]) if whole.ndim else ()
            block = torch.empty(shape, dtype=whole.dtype, device=device)
        if dist.get_world_size() > 1:
            # As bytes: gloo supports neither float8 nor complex dtypes.
            dist.broadcast(block.view(-1).view(torch.uint8), src=0)
        yield begin, block


def _copy_part(target: torch.Tensor, block: torch.Tensor, begin: int, name: str) -> None:
    """Copy this rank's shard of a block of rows into `target`."""
    if not isinstance(target, DTensor):
        local, rows = target, slice(begin, begin + len(block)) if block.ndim else ...
        local[rows].copy_(block)
        return
    local = target.to_local()
    if not block.ndim:
        local.copy_(block)
        return
    rows, *columns = local_positions(target, name)
    mine = (rows >= begin) & (rows < begin + len(block))
    part = block[(rows[mine] - begin).to(block.device)]
    for dim, places in enumerate(columns, start=1):
        if len(places) < target.shape[dim]:
            part = part.index_select(dim, places.to(block.device))
    local[mine.to(local.device)] = part


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
