"""Dtypes of the tensors in a folder of weights, which an export of the fine-tuned model keeps."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Self, final

import torch

from d9d_state import ModelFolder


@final
@dataclass(frozen=True, slots=True)
class FolderDtypes:
    """Dtypes of the floating-point tensors in a folder.

    Attributes:
        tensors: Dtypes by name, without quantized tensors.
        main: Dtype of all others: quantized tensors, which are exported dequantized, and new ones.
    """

    tensors: dict[str, torch.dtype]
    main: torch.dtype

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the dtypes from the headers of the files; the main dtype is that in config.json, or the most common."""
        stored = ModelFolder.open(folder).tensors
        dtypes = {name: info.dtype for name, info in stored.items()}
        dtypes = {name: each for name, each in dtypes.items() if each.is_floating_point and each.itemsize > 1}
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        name = config.get("dtype") or config.get("torch_dtype")
        common = Counter(dtypes.values()).most_common(1)
        main = getattr(torch, name, None) if isinstance(name, str) else None
        return cls(dtypes, main or (common[0][0] if common else torch.float32))

    def of(self, name: str) -> torch.dtype:
        """Return the dtype in which to export a floating-point tensor."""
        return self.tensors.get(name, self.main)
