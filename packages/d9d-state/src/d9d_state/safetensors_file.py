"""Write a safetensors file in one pass, with the digest of each tensor."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import final

from torch import Tensor

from d9d_state._digests import PartRecord
from d9d_state._files import write_file
from d9d_state._member import AnyPath
from d9d_state._tensor_bytes import bytes_of
from d9d_state.safetensors_layout import FileLayout
from d9d_state.tensor_info import TensorInfo


@final
@dataclass(frozen=True, slots=True)
class SafetensorsRecord:
    """Sizes and digests of a file's header and tensors, in the order of the file, which has no gaps."""

    header: PartRecord
    tensors: Mapping[str, PartRecord]


def write_safetensors(
    path: AnyPath, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> SafetensorsRecord:
    """Write plain tensors to a new safetensors file and fsync it; return the size and digest of each part.

    Tensors are copied to the CPU one at a time and must not change before this returns.
    """
    layout = FileLayout.of({name: TensorInfo.of(tensor) for name, tensor in tensors.items()}, metadata=metadata)
    header, *records = write_file(path, _parts(layout, tensors))
    return SafetensorsRecord(header, dict(zip(layout.starts, records, strict=True)))


def _parts(layout: FileLayout, tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    yield layout.header
    for name in layout.starts:
        yield bytes_of(tensors[name].detach().resolve_conj().resolve_neg().to("cpu").contiguous())
