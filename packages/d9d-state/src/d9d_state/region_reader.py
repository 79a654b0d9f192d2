"""Reads of tensor regions from safetensors files directly into their destination, with `preadv`.

`mmap` would be less code, but mapped pages count as process memory until the file is closed. Slicing a mapped tensor
also makes an extra copy. If dtype, strides or device differ, the data passes through a buffer of a few MiB.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, wait
from itertools import product
from math import prod
from threading import Lock
from typing import Self, final

import torch
from torch import Tensor

from d9d_dist import Region
from d9d_state._member import AnyPath, MemberReader, open_reader
from d9d_state._tensor_bytes import bytes_of
from d9d_state.errors import StateError
from d9d_state.model_folder import ModelFolder
from d9d_state.object_path import ObjectPath
from d9d_state.tensor_info import TensorInfo

_BLOCK = 1 << 22  # bytes per read, and size of the buffer if one is needed
_GAP = 1 << 12  # bytes; gaps of up to a page between wanted runs are read too, because disks return whole pages
_OBJECT_GAP = 1 << 16  # bytes; an additional request to an object store takes longer than transferring this many bytes


@final
class RegionReader:
    """Reader of tensor regions in a model folder, thread-safe; `num_bytes_read` counts the bytes read so far."""

    def __init__(self, folder: ModelFolder, *, pool: Executor | None = None) -> None:
        """Create the reader; files are opened at their first read.

        The threads of `pool` read the blocks of a large region in parallel. Calling `read_into` in one of these threads
        could deadlock.
        """
        self._folder = folder
        self._pool = pool
        self._files: dict[AnyPath, MemberReader] = {}
        self._lock = Lock()
        self.num_bytes_read = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for reader in self._files.values():
            reader.close()

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Shape and dtype of every tensor."""
        return self._folder.tensors

    @torch.no_grad()
    def read_into(self, name: str, region: Region, target: Tensor) -> None:
        """Read a region of a stored tensor into a plain tensor of its shape, on any device, with any strides.

        Values are converted to the target's dtype as by `copy_`. Raises `StateError` if the file is unreadable,
        truncated or was replaced since its header was read, and `UserError` if it no longer exists or is not a regular
        file.
        """
        assert tuple(target.shape) == region.sizes, f"{name}: target and region have different shapes"
        gap = _OBJECT_GAP if isinstance(self._folder.path, ObjectPath) else _GAP
        blocks = list(_blocks(self._folder.tensors[name], region, target, gap=gap))
        if self._pool is None or len(blocks) < 2:
            for block in blocks:
                self._read_block(name, *block)
            return
        tasks = [self._pool.submit(self._read_block, name, *block) for block in blocks]
        wait(tasks)
        for task in tasks:
            task.result()

    def _read_block(self, name: str, wanted: Region, read: Region, target: Tensor) -> None:
        """Read a region into a buffer, and copy the wanted part of it to the target; or read into the target itself."""
        dtype = self._folder.tensors[name].dtype
        if read == wanted and target.is_cpu and target.dtype == dtype and target.is_contiguous():
            self._read(name, read, target)
            return
        # Pinned memory is copied to an accelerator at full bandwidth.
        buffer = torch.empty(read.sizes, dtype=dtype, pin_memory=not target.is_cpu)
        self._read(name, read, buffer)
        target.copy_(wanted.relative_to(read).of(buffer))

    def _read(self, name: str, region: Region, target: Tensor) -> None:
        """Read a region into contiguous memory on the CPU."""
        path, first = self._folder.files[name], self._folder.starts[name]
        raw, position = bytes_of(target), 0
        try:
            reader = self._open(path)
            if self._folder.stamps[name] not in (None, reader.stamp):
                raise StateError(
                    f"{path} has changed since its header was read, as by a new export. Load the weights again."
                )
            for offset, size in _runs(self._folder.tensors[name], region):
                shift, end = first + offset - position, position + size
                while position < end:
                    count = reader.read_into(raw[position:end], position + shift)
                    if count == 0:
                        raise StateError(
                            f"{path} ends before the end of {name}; the file has changed since its header was read."
                        )
                    position += count
        except OSError as error:
            raise StateError(f"{name} cannot be read from {path}: {error.strerror or error}.") from error
        with self._lock:
            self.num_bytes_read += position

    def _open(self, path: AnyPath) -> MemberReader:
        with self._lock:
            if path not in self._files:
                self._files[path] = open_reader(path.parent, path.name)
            return self._files[path]


def _blocks(info: TensorInfo, region: Region, target: Tensor, *, gap: int) -> Iterator[tuple[Region, Region, Tensor]]:
    """Cut a region into blocks of at most 4 MiB, along its first dims: wanted region, region to read, and target."""
    if region.num_elements == 0:
        return
    read = _with_small_gaps(info, region, gap=gap)
    num_bytes = read.num_elements * info.dtype.itemsize
    dim = next((dim for dim, size in enumerate(region.sizes) if size > 1), None)
    if num_bytes <= _BLOCK or dim is None:
        yield region, read, target
        return
    step = max(1, region.sizes[dim] * _BLOCK // num_bytes)
    for start in range(0, region.sizes[dim], step):
        size = min(step, region.sizes[dim] - start)
        part = region.replaced(dim, region.offsets[dim] + start, size)
        yield from _blocks(info, part, target.narrow(dim, start, size), gap=gap)


def _with_small_gaps(info: TensorInfo, region: Region, *, gap: int) -> Region:
    """Enlarge a region by the gaps between its contiguous runs, if they have at most `gap` bytes."""
    offsets, sizes = list(region.offsets), list(region.sizes)
    inner = info.dtype.itemsize
    for dim in reversed(range(len(sizes))):
        found = (info.shape[dim] - sizes[dim]) * inner
        if found and (found > gap or prod(sizes[:dim]) == 1):
            break
        offsets[dim], sizes[dim] = 0, info.shape[dim]
        inner *= info.shape[dim]
    return Region(tuple(offsets), tuple(sizes))


def _runs(info: TensorInfo, region: Region) -> Iterator[tuple[int, int]]:
    """Iterate over a region's contiguous runs: offset in the tensor's data and length, in bytes."""
    strides = [prod(info.shape[dim + 1 :]) * info.dtype.itemsize for dim in range(len(info.shape))]
    inner = len(info.shape)
    while inner and region.sizes[inner - 1] == info.shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)
    length = prod(region.sizes[outer:]) * info.dtype.itemsize
    first = sum(offset * stride for offset, stride in zip(region.offsets, strides, strict=True))
    for indices in product(*(range(size) for size in region.sizes[:outer])):
        yield first + sum(index * stride for index, stride in zip(indices, strides, strict=False)), length
