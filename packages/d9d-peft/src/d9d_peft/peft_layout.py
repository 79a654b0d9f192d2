"""File layout of adapters in Hugging Face `peft`: tensors and their names.

https://huggingface.co/docs/peft/developer_guides/checkpoint: `adapter_model.safetensors` holds
`base_model.model.<layer>.lora_A.weight` and `...lora_B.weight` for each adapted layer, for embeddings
`...lora_embedding_A` and `...lora_embedding_B`, and for DoRA `...lora_magnitude_vector`.
Parameters of fully fine-tuned modules have their own names after `base_model.model.`.
`d9d_peft.peft_config` documents `adapter_config.json`, `d9d_peft.stored_parameter` the adapters of parameters [experts,
out, in].
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from d9d_dist import copy_from_full_, full_tensor
from d9d_peft.all_linear import weight_of
from d9d_peft.dora import DoraAdapter, row_norms
from d9d_peft.lora import LoraAdapter

TENSORS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"

PREFIX = "base_model.model."
A, B = "lora_A.weight", "lora_B.weight"
_MAGNITUDE = "lora_magnitude_vector"
# Files hold transposed factors of embeddings: A [rank, vocabulary] is our B, and B [features, rank] is our A.
_EMBEDDING_A, _EMBEDDING_B = "lora_embedding_A", "lora_embedding_B"


@final
@dataclass(frozen=True, slots=True)
class StoredLayer:
    """Layer with an adapter, and its names in adapter files.

    Attributes:
        names: Name of the layer in the base checkpoint; for a grouped layer one name per group.
    """

    names: tuple[str, ...]
    layer: nn.Module
    adapter: LoraAdapter | DoraAdapter

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the layer's tensors in a file, by name."""
        return {
            key: tuple(_stored_form(suffix, parameter).shape[parameter.ndim - num_dims :])
            for suffix, parameter, num_dims in self._parameters()
            for key in self._keys(suffix)
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return the full tensors of the layer for a file, by name. Collective if parameters are sharded."""
        tensors: dict[str, Tensor] = {}
        for suffix, parameter, _ in self._parameters():
            values = _stored_form(suffix, full_tensor(parameter))
            if suffix == _MAGNITUDE:
                values = values + self._base_norms()
            keys = self._keys(suffix)
            parts = values.unbind() if len(keys) > 1 else [values]
            tensors.update(zip(keys, (part.to(parameter.dtype) for part in parts), strict=True))
        return tensors

    def fill(self, read: Callable[[str], Tensor]) -> None:
        """Copy the tensors that `read` returns by name to the parameters. Collective for DoRA if these are sharded."""
        for suffix, parameter, _ in self._parameters():
            parts = [read(key).to(parameter.device) for key in self._keys(suffix)]
            values = _stored_form(suffix, torch.stack(parts) if len(parts) > 1 else parts[0])
            copy_from_full_(parameter, values - self._base_norms() if suffix == _MAGNITUDE else values)

    def _parameters(self) -> list[tuple[str, Tensor, int]]:
        """Return for each parameter of the adapter: its name suffix, the tensor and the number of dims in a file."""
        adapter = self.adapter
        if isinstance(adapter, LoraAdapter) and adapter.is_embedding:
            return [(_EMBEDDING_A, adapter.lora_b, 2), (_EMBEDDING_B, adapter.lora_a, 2)]
        num_dims = 2 if len(self.names) > 1 else adapter.lora_a.ndim
        factors: list[tuple[str, Tensor, int]] = [(A, adapter.lora_a, num_dims), (B, adapter.lora_b, num_dims)]
        return [*factors, (_MAGNITUDE, adapter.magnitude_offset, 1)] if isinstance(adapter, DoraAdapter) else factors

    def _keys(self, suffix: str) -> list[str]:
        return [f"{PREFIX}{name}.{suffix}" for name in self.names]

    def _base_norms(self) -> Tensor:
        """Return the base weight's row norms [out]. Files hold magnitudes; adapters hold offsets from these norms."""
        return row_norms(weight_of(self.layer))


def _stored_form(suffix: str, tensor: Tensor) -> Tensor:
    """Transpose the factors of an embedding; its own inverse."""
    return tensor.mT if suffix in (_EMBEDDING_A, _EMBEDDING_B) else tensor
