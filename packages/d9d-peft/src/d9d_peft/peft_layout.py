"""The layout in which Hugging Face `peft` keeps adapters: which tensors, and under which names.

https://huggingface.co/docs/peft/developer_guides/checkpoint: `adapter_model.safetensors` holds
`base_model.model.<layer>.lora_A.weight` and `...lora_B.weight` for each layer of the base model, with DoRA
`...lora_magnitude_vector`, and the parameters of modules that are trained as they are under their own names;
`adapter_config.json` (`d9d_peft.peft_config`) says how they are applied. Adapters of a parameter
[experts, out, in] are in `d9d_peft.stored_parameter`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from d9d_peft._sharded import fill, row_norms, whole
from d9d_peft.adapter import AdaptedLayer
from d9d_peft.dora import DoraAdapter
from d9d_peft.lora import LoraAdapter
from d9d_peft.low_rank import LowRank

TENSORS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"

PREFIX = "base_model.model."
A, B = "lora_A.weight", "lora_B.weight"
_MAGNITUDE = "lora_magnitude_vector"


@final
@dataclass(frozen=True, slots=True)
class StoredLayer:
    """A layer with an adapter, as files have it.

    Attributes:
        names: The layer's name in the base checkpoint; for a layer of groups, the name of each group.
        adapted: The layer here.
    """

    names: tuple[str, ...]
    adapted: AdaptedLayer

    @property
    def low_rank(self) -> LowRank:
        """Rank and scale."""
        assert isinstance(self.adapted.adapter, LoraAdapter | DoraAdapter)
        return self.adapted.adapter.low_rank

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its tensors in a file."""
        return {
            key: tuple(parameter.shape[parameter.ndim - num_dims :])
            for suffix, parameter, num_dims in self._parameters()
            for key in self._keys(suffix)
        }

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors for a file, whole. Collective where parameters are sharded."""
        tensors: dict[str, Tensor] = {}
        for suffix, parameter, _ in self._parameters():
            values = self._magnitude() + whole(parameter) if suffix == _MAGNITUDE else whole(parameter)
            keys = self._keys(suffix)
            parts = values.unbind() if len(keys) > 1 else [values]
            tensors.update(zip(keys, (part.to(parameter.dtype) for part in parts), strict=True))
        return tensors

    def fill(self, read: Callable[[str], Tensor]) -> None:
        """Set the parameters from tensors of a file. Collective for DoRA where parameters are sharded.

        Args:
            read: Gives a tensor by its name in the file.
        """
        for suffix, parameter, _ in self._parameters():
            parts = [read(key).to(parameter.device) for key in self._keys(suffix)]
            values = torch.stack(parts) if len(parts) > 1 else parts[0]
            fill(parameter, values - self._magnitude() if suffix == _MAGNITUDE else values)

    def _parameters(self) -> list[tuple[str, Tensor, int]]:
        """What ends the names in a file, the parameter here, and how many dims it has in a file."""
        adapter = self.adapted.adapter
        assert isinstance(adapter, LoraAdapter | DoraAdapter)
        num_dims = 2 if len(self.names) > 1 else adapter.lora_a.ndim
        factors: list[tuple[str, Tensor, int]] = [(A, adapter.lora_a, num_dims), (B, adapter.lora_b, num_dims)]
        return [*factors, (_MAGNITUDE, adapter.magnitude_offset, 1)] if isinstance(adapter, DoraAdapter) else factors

    def _keys(self, suffix: str) -> list[str]:
        return [f"{PREFIX}{name}.{suffix}" for name in self.names]

    def _magnitude(self) -> Tensor:
        """What a file's lengths of rows are counted from."""
        weight_OI = self.adapted.layer._parameters["weight"]
        assert weight_OI is not None
        return row_norms(weight_OI)


def module_key(name: str) -> str:
    """The name in a file of a tensor of a module that is trained as it is."""
    return f"{PREFIX}{name}"


def module_name(key: str) -> str:
    """The name in the base checkpoint of a tensor that `module_key` named."""
    return key.removeprefix(PREFIX)


def kind(adapter: object) -> str | None:
    """What the layout calls an adapter; `None` if it has no name for it."""
    match adapter:
        case LoraAdapter():
            return "LoRA"
        case DoraAdapter():
            return "DoRA"
        case _:
            return None
