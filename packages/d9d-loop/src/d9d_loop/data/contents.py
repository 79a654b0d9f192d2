"""Digests of the contents of data. Ranks with different data, and a resume with other data, are errors.

Files are compared completely up to 256 MiB, larger files by their sizes and by blocks spread over the files. Other
datasets are compared by their lengths and by a few samples, which are read for it.
"""

import ctypes
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from pydantic import JsonValue
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from d9d_dist import UserError, agree
from d9d_loop.data.in_fork import read_apart
from d9d_loop.data.sample_order import SampleOrder
from d9d_loop.data.sample_stream import Samples, SampleStream
from d9d_loop.isolation import isolated_random

NUM_COMPARED = 16
"""Number of samples of a dataset that are compared."""
_WHOLE = 1 << 28
_BLOCK, _NUM_BLOCKS = 1 << 16, 256


@runtime_checkable
class HasContentsDigest(Protocol):
    """Dataset, or dataclass in a sample, that knows a digest of its contents, such as one of files."""

    def contents_digest(self) -> JsonValue:
        """Return a JSON value that differs if the contents do."""
        ...


def contents_of(samples: Any) -> JsonValue:
    """Return a JSON value that identifies the contents of a map-style dataset.

    Datasets with a method `contents_digest` identify themselves; subsets are their datasets and indices, and
    concatenations of at most 16 datasets are these. Of any other dataset, at most 16 samples are read, with random
    numbers that are seeded by the index.
    """
    if isinstance(samples, HasContentsDigest):
        return samples.contents_digest()
    if isinstance(samples, Subset):
        given: Any = samples.indices
        indices = given.contents_digest() if isinstance(given, HasContentsDigest) else digest_of(torch.as_tensor(given))
        return {"of": contents_of(samples.dataset), "indices": indices}
    if isinstance(samples, ConcatDataset) and len(samples.datasets) <= NUM_COMPARED:
        return [contents_of(each) for each in samples.datasets]
    return sampled_digest(samples)


def agree_on_data(identities: Mapping[str, JsonValue]) -> None:
    """Raise `UserError` on all ranks if identities of data, by their names in the message, differ. Collective."""
    try:
        agree(same={name: _texts_of(each) for name, each in identities.items()})
    except UserError as error:
        raise UserError(
            f"{error} Each rank must pass the whole data, not a part such as data[rank::world_size], because the job "
            "divides them; data that are made with random numbers need a fixed seed."
        ) from None


def identity_of(data: Samples | SampleStream | None) -> JsonValue:
    """Return the identity of a stream, or the length and the contents of a dataset. Reads samples."""
    if data is None:
        return None
    return data.identity() if isinstance(data, SampleStream) else {"samples": len(data), "contents": contents_of(data)}


def _texts_of(identity: JsonValue) -> dict[str, str]:
    return dict(flatten(identity if isinstance(identity, Mapping) else {"identity": identity}))


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield each value of nested mappings under its dotted key, as text."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", repr(value)


def check_repeatable(read: Callable[[], Any], *, num_workers: int = 0) -> None:
    """Raise `UserError` if `read`, which reads and collates samples, gives other values the second time.

    The global generators have equal states both times. If `read` raises, nothing is checked. See `read_apart` for
    `num_workers`.
    """
    if read_apart(lambda: _is_repeatable(read), num_workers=num_workers, what="the first samples") is False:
        raise UserError(
            "reading and collating the first samples twice gave different values, although the generators of Python, "
            "NumPy and torch had equal states; expected equal values, because others differ between ranks and after a "
            "resume. Draw from random, numpy.random or torch, which are seeded by the position of the sample, and not "
            "from a generator of the dataset or the collator, such as numpy.random.default_rng() or a seed= of it."
        )


def _is_repeatable(read: Callable[[], Any]) -> bool:
    try:
        return len({_digest_of_seeded(read) for _ in range(2)}) == 1
    except Exception:
        return True


def _digest_of_seeded(read: Callable[[], Any]) -> str:
    with isolated_random(0, "data at", 0):
        return digest_of(read())


def sampled_digest(samples: Samples) -> str:
    """Return the digest of at most 16 samples of a dataset: the first, the last and pseudorandom ones."""
    last = len(samples) - 1
    chosen = {0, last, *SampleOrder(last + 1, seed=0).take(0, min(NUM_COMPARED - 2, last + 1))} if last >= 0 else set()
    return digest_of([_read(samples.__getitem__, index, index) for index in sorted(chosen)])


def first_digest(stream: SampleStream, convert: Callable[[Any], Any] = lambda sample: sample) -> str:
    """Return the digest of the first four samples of a stream, converted by `convert`."""
    entries = stream.cursor().take(4)
    return digest_of(
        [_read(lambda entry: convert(stream.read(entry)), entry, position) for position, entry in enumerate(entries)]
    )


def _read(read: Callable[[Any], Any], entry: Any, position: int) -> Any:
    try:
        with isolated_random(0, "data at", position):
            return read(entry)
    except Exception as error:  # reported where the sample is used
        return type(error).__qualname__


def digest_of(value: Any) -> str:
    """Return a digest of a sample: a pytree of tensors, arrays, texts, bytes, numbers and dataclasses.

    Only the types of other objects are compared.
    """
    digest = hashlib.sha256()
    for part in _parts(value):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    match value:
        case Mapping():
            yield b"mapping %d" % len(value)
            for item in value.items():
                yield from _parts(item)
        case list() | tuple():
            yield b"sequence %d" % len(value)
            for each in value:
                yield from _parts(each)
        case _ if is_dataclass(value) and not isinstance(value, type):
            named = {field.name: getattr(value, field.name) for field in fields(value)}
            yield from _parts(value.contents_digest() if isinstance(value, HasContentsDigest) else named)
        case Tensor():
            yield from _parts_of_tensor(value)
        case bytes() | bytearray():
            yield bytes(value)
        case None | bool() | int() | float() | complex() | str():
            yield f"{type(value).__name__} {value!r}".encode()
        case _ if hasattr(value, "tobytes"):  # NumPy, Pillow
            yield f"{getattr(value, 'dtype', '')} {getattr(value, 'shape', '')}".encode()
            is_of_objects = getattr(value, "dtype", None) == object  # noqa: E721 - a dtype, equal to the type
            yield from _parts(value.tolist() if is_of_objects else value.tobytes())
        case _:
            yield from _parts(type(value).__qualname__)


def _parts_of_tensor(tensor: Tensor) -> Iterator[bytes]:
    if tensor.is_nested:
        yield from _parts(tensor.unbind())
        return
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    data = dense.cpu().contiguous()
    yield f"{data.dtype} {tuple(data.shape)}".encode()
    yield ctypes.string_at(data.data_ptr(), data.nbytes) if data.nbytes else b""


def digest_of_files(paths: Sequence[Path]) -> str:
    """Return a digest of the bytes of files, in order; of more than 256 MiB, of the sizes and of 256 blocks."""
    digest, sizes = hashlib.sha256(), [path.stat().st_size for path in paths]
    step = max(sum(sizes) // _NUM_BLOCKS, _BLOCK)
    for path, size in zip(paths, sizes, strict=True):
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            if sum(sizes) <= _WHOLE:
                digest.update(hashlib.file_digest(file, "sha256").digest())
                continue
            for start in {*range(0, size, step), max(size - _BLOCK, 0)}:
                file.seek(start)
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()
