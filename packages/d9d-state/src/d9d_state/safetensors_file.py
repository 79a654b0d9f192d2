"""Safetensors files, written in one pass with the digest of each tensor; every call can be counted."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from torch import Tensor

from d9d_state._digests import PartRecord
from d9d_state._files import write_file
from d9d_state._tensor_bytes import bytes_of
from d9d_state.safetensors_layout import FileLayout
from d9d_state.tensor_info import TensorInfo


@final
@dataclass(frozen=True, slots=True)
class SafetensorsRecord:
    """What a file must look like to be the one that was written.

    Attributes:
        header: Its header, from the first byte of the file on.
        tensors: Each tensor, in the order in which they lie, right behind each other.
    """

    header: PartRecord
    tensors: Mapping[str, PartRecord]


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> SafetensorsRecord:
    """Write a file that does not exist yet, and bring it to the disk.

    Args:
        path: The file.
        tensors: Plain tensors of any device; each is moved to the CPU when its turn comes. None of them changes
            before this returns.
        metadata: Texts for the header's `__metadata__`.

    Returns:
        Sizes and digests.

    Raises:
        ValueError: If a dtype has no place in the format.
    """
    layout = FileLayout.of({name: TensorInfo.of(tensor) for name, tensor in tensors.items()}, metadata=metadata)
    header, *records = write_file(path, _parts(layout, tensors))
    return SafetensorsRecord(header, dict(zip(layout.starts, records, strict=True)))


def _parts(layout: FileLayout, tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    yield layout.header
    for name in layout.starts:
        on_cpu = tensors[name].detach().resolve_conj().resolve_neg().to("cpu").contiguous()
        view = bytes_of(on_cpu)
        if view.nbytes:
            view.obj.tensor = on_cpu  # ty: ignore[missing-attribute]  (the view keeps it alive until it is hashed)
        yield view
