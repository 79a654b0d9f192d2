"""Verification of a checkpoint's digests, part by part, so that ranks and threads can share the work."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import final

from xxhash import xxh3_128

from d9d_dist import DistributedContext, UserError
from d9d_state._digests import ALGORITHM, PartRecord
from d9d_state._member import AnyPath, MemberReader, open_reader
from d9d_state.checkpoint.manifest import Manifest
from d9d_state.object_path import ObjectPath

_BLOCK = 1 << 20  # bytes that are read and hashed at once; they stay in the cache of a processor core
_MAX_THREADS = 8
_OBJECT_BLOCK = 1 << 23  # bytes of one request to an object store


@final
@dataclass(frozen=True, slots=True)
class FilePart:
    """Contiguous part of a file with a recorded digest; `size` is the expected size of the whole file in bytes."""

    file: str
    size: int
    start: int
    record: PartRecord
    what: str


def parts_of(manifest: Manifest) -> list[FilePart]:
    """Return the parts of all files of a checkpoint, sorted by file and position."""
    parts = [
        FilePart(name, file.size, 0, file.head, "the header" if name.endswith(".safetensors") else "the content")
        for name, file in manifest.files.items()
    ]
    for name, record in manifest.tensors.items():
        for chunk in record.chunks:
            what = f"{name} {record.info.describe()}"
            if chunk.region.sizes != record.info.shape:
                what += f", chunk {list(chunk.region.sizes)} at {list(chunk.region.offsets)},"
            size = chunk.region.num_elements * record.info.dtype.itemsize
            file_size = manifest.files[chunk.file].size
            parts.append(FilePart(chunk.file, file_size, chunk.start, PartRecord(size, chunk.digest), what))
    return sorted(parts, key=lambda part: (part.file, part.start))


def share_of(parts: Sequence[FilePart], *, rank: int, num_ranks: int) -> list[FilePart]:
    """Return the parts that a rank verifies: about an equal share of the bytes, contiguous for fast reads."""
    total = sum(part.record.size for part in parts) + len(parts)
    mine: list[FilePart] = []
    position = 0
    for part in parts:
        if position * num_ranks // total == rank:
            mine.append(part)
        position += part.record.size + 1
    return mine


def num_threads(ctx: DistributedContext | None) -> int:
    """Return a rank's number of reader threads: two per CPU in its share of the node, at least 2 and at most 8.

    While one of the two threads waits for the disk, the other thread hashes.
    """
    ranks_here = 1 if ctx is None else -(-ctx.world_size // ctx.num_nodes)
    return max(2, min(_MAX_THREADS, 2 * (os.cpu_count() or 1) // ranks_here))


def damage(folder: AnyPath, parts: Sequence[FilePart], *, threads: int) -> list[str]:
    """Compare parts of a checkpoint's files with the records; return one error text for each damaged part.

    Each thread reads one contiguous share of the bytes: the kernel then reads ahead. If threads took parts in turn, its
    readahead would fetch what another thread reads, and verification would be slower than one thread.
    """
    shares = [share_of(parts, rank=thread, num_ranks=threads) for thread in range(threads)]
    with ThreadPoolExecutor(threads, thread_name_prefix="d9d-verify") as pool:
        found = pool.map(partial(_problems, folder), shares)
        return list(dict.fromkeys(text for problems in found for text in problems))


def _problems(folder: AnyPath, parts: Sequence[FilePart]) -> list[str]:
    """Return the error texts of parts, which are sorted by file; a file that cannot be read has one."""
    problems: list[str] = []
    block = memoryview(bytearray(_OBJECT_BLOCK if isinstance(folder, ObjectPath) else _BLOCK))
    for name, of_file in groupby(parts, key=lambda part: part.file):
        path = folder / name
        try:
            with closing(open_reader(folder, name)) as reader:
                for part in of_file:
                    if reader.size != part.size:
                        problems.append(f"{path} has {reader.size} bytes; expected {part.size}")
                        break
                    if _digest(reader, part, block) != part.record.digest:
                        problems.append(f"{path}: {part.what} does not have the recorded {ALGORITHM} digest")
        except (UserError, OSError) as error:
            problems.append(str(error) if str(path) in str(error) else f"{path}: {error}")
    return problems


def _digest(reader: MemberReader, part: FilePart, block: memoryview) -> str:
    digest = xxh3_128()
    position, left = part.start, part.record.size
    while left:
        count = reader.read_into(block[: min(left, len(block))], position)
        if count == 0:
            break
        digest.update(block[:count])
        position, left = position + count, left - count
    return digest.hexdigest()
