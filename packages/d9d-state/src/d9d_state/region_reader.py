"""Boxes of stored tensors, read straight into the memory where they are wanted, by positional reads.

Mapping a file would be shorter, but its pages count as memory of the process until it is closed, and a slice of what is
mapped is a copy before it is the copy that was asked for. What is read here, by several threads, lands in place; a
buffer of a few MiB stands between only where dtypes, strides or devices differ.
"""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from threading import Lock
from typing import Self, final

import torch
from torch import Tensor

from d9d_state._member import open_member
from d9d_state._tensor_bytes import bytes_of
from d9d_state.errors import StateError
from d9d_state.mapper.region import Region
from d9d_state.model_folder import ModelFolder
from d9d_state.tensor_info import TensorInfo

_BLOCK = 1 << 22  # bytes read at a time, and the size of a buffer where one is needed
_GAP = 1 << 12  # bytes between wanted ones that are read along: a disk gives whole pages anyway


@final
class RegionReader:
    """Reads regions of the tensors in a folder. Threads may share it.

    Attributes:
        num_bytes_read: How many bytes were asked of the file system so far.
    """

    def __init__(self, folder: ModelFolder, *, pool: Executor | None = None) -> None:
        """Open nothing yet.

        Args:
            folder: Where the tensors are.
            pool: Threads that share out a large region; `None` reads in the thread that asks. Not the pool that this
                reader is called from.
        """
        self._folder = folder
        self._pool = pool
        self._files: dict[Path, int] = {}
        self._lock = Lock()
        self.num_bytes_read = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)

    @property
    def opened(self) -> list[Path]:
        """The files that something was read from, in the order in which they were opened."""
        return list(self._files)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Shape and dtype of every tensor."""
        return self._folder.tensors

    @torch.no_grad()
    def read_into(self, name: str, region: Region, target: Tensor) -> None:
        """Copy a region of a stored tensor.

        Args:
            name: The tensor.
            region: Which part of it.
            target: Of the shape of the region; plain, on any device, with any strides. Dtypes convert as in `copy_`.

        Raises:
            StateError: If the file cannot be read or has become shorter. Naming the tensor and the file.
            UserError: If the file is not there any more, or is not a regular file.
        """
        assert tuple(target.shape) == region.sizes, f"{name}: a target of another shape than the region"
        blocks = list(_blocks(self._folder.tensors[name], region, target))
        if self._pool is None or len(blocks) < 2:
            for block in blocks:
                self._read_block(name, block)
            return
        tasks = [self._pool.submit(self._read_block, name, block) for block in blocks]
        wait(tasks)
        for task in tasks:
            task.result()

    def _read_block(self, name: str, block: "_Block") -> None:
        target, dtype = block.target, self._folder.tensors[name].dtype
        if block.read == block.wanted and target.is_cpu and target.dtype == dtype and target.is_contiguous():
            self._read(name, block.read, target)
            return
        # Pinned, a buffer travels to an accelerator at its full speed.
        buffer = torch.empty(block.read.sizes, dtype=dtype, pin_memory=not target.is_cpu)
        self._read(name, block.read, buffer)
        target.copy_(_cut(buffer, block))

    def _read(self, name: str, region: Region, target: Tensor) -> None:
        """Read a region into contiguous memory on the CPU."""
        info = self._folder.tensors[name]
        raw = bytes_of(target)
        position = 0
        for offset, size in _runs(info, region):
            start = self._folder.starts[name] + offset
            self._pread(name, start, raw[position : position + size])
            position += size
        with self._lock:
            self.num_bytes_read += position

    def _pread(self, name: str, start: int, raw: memoryview) -> None:
        path = self._folder.files[name]
        try:
            while raw:
                count = os.preadv(self._open(path), [raw], start)
                if count == 0:
                    raise StateError(f"{path} ends before {name} does; it has changed since its header was read.")
                raw, start = raw[count:], start + count
        except OSError as error:
            raise StateError(f"{name} cannot be read from {path}: {error.strerror}.") from error

    def _open(self, path: Path) -> int:
        with self._lock:
            if path not in self._files:
                self._files[path] = open_member(path.parent, path.name)
            return self._files[path]


@dataclass(frozen=True, slots=True)
class _Block:
    """What is read at once: the region that is wanted, the one around it that is read, and where it goes."""

    wanted: Region
    read: Region
    target: Tensor


def _blocks(info: TensorInfo, region: Region, target: Tensor) -> Iterator[_Block]:
    """Cut a region into blocks of a bounded size, along its first dims."""
    if region.num_elements == 0:
        return
    read = _with_small_gaps(info, region)
    num_bytes = read.num_elements * info.dtype.itemsize
    dim = next((dim for dim, size in enumerate(region.sizes) if size > 1), None)
    if num_bytes <= _BLOCK or dim is None:
        yield _Block(region, read, target)
        return
    step = max(1, region.sizes[dim] * _BLOCK // num_bytes)
    for start in range(0, region.sizes[dim], step):
        size = min(step, region.sizes[dim] - start)
        yield from _blocks(info, _narrowed(region, dim, start, size), target.narrow(dim, start, size))


def _with_small_gaps(info: TensorInfo, region: Region) -> Region:
    """The region and what lies between its runs, where that is less than a page."""
    offsets, sizes = list(region.offsets), list(region.sizes)
    inner = info.dtype.itemsize
    for dim in reversed(range(len(sizes))):
        gap = (info.shape[dim] - sizes[dim]) * inner
        if gap and (gap > _GAP or prod(sizes[:dim]) == 1):
            break
        offsets[dim], sizes[dim] = 0, info.shape[dim]
        inner *= info.shape[dim]
    return Region(tuple(offsets), tuple(sizes))


def _runs(info: TensorInfo, region: Region) -> Iterator[tuple[int, int]]:
    """Where the bytes of a region are, from the tensor's first byte: start and length of each contiguous run."""
    strides = [prod(info.shape[dim + 1 :]) * info.dtype.itemsize for dim in range(len(info.shape))]
    inner = len(info.shape)
    while inner and region.sizes[inner - 1] == info.shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)
    length = prod(region.sizes[outer:]) * info.dtype.itemsize
    first = sum(offset * stride for offset, stride in zip(region.offsets, strides, strict=True))
    for indices in product(*(range(size) for size in region.sizes[:outer])):
        yield first + sum(index * stride for index, stride in zip(indices, strides, strict=False)), length


def _narrowed(region: Region, dim: int, start: int, size: int) -> Region:
    offsets, sizes = list(region.offsets), list(region.sizes)
    offsets[dim] += start
    sizes[dim] = size
    return Region(tuple(offsets), tuple(sizes))


def _cut(buffer: Tensor, block: _Block) -> Tensor:
    """What is wanted of what was read."""
    for dim, size in enumerate(block.wanted.sizes):
        buffer = buffer.narrow(dim, block.wanted.offsets[dim] - block.read.offsets[dim], size)
    return buffer
