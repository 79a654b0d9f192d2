"""The layout in which Hugging Face `peft` keeps adapters: which tensors, under which names, and what the JSON says.

https://huggingface.co/docs/peft/developer_guides/checkpoint: `adapter_model.safetensors` holds
`base_model.model.<layer>.lora_A.weight` and `...lora_B.weight` for each layer of the base model, with DoRA
`...lora_magnitude_vector`, and the parameters of modules that are trained as they are under their own names;
`adapter_config.json` says how they are applied.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from d9d_dist import UserError
from d9d_peft._sharded import fill, row_norms, whole
from d9d_peft.adapter import AdaptedLayer
from d9d_peft.dora import DoraAdapter
from d9d_peft.lora import LoraAdapter
from d9d_peft.low_rank import LowRank

TENSORS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"

_PREFIX = "base_model.model."
_A, _B, _MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
# What changes the meaning of the tensors in a way that no adapter here has.
_UNKNOWN_OPTIONS = (
    "fan_in_fan_out", "lora_bias", "layer_replication", "target_parameters", "trainable_token_indices",
    "alora_invocation_tokens", "use_qalora", "megatron_config",
)  # fmt: skip

_T = TypeVar("_T")


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
        factors: list[tuple[str, Tensor, int]] = [(_A, adapter.lora_a, num_dims), (_B, adapter.lora_b, num_dims)]
        return [*factors, (_MAGNITUDE, adapter.magnitude_offset, 1)] if isinstance(adapter, DoraAdapter) else factors

    def _keys(self, suffix: str) -> list[str]:
        return [f"{_PREFIX}{name}.{suffix}" for name in self.names]

    def _magnitude(self) -> Tensor:
        """What a file's lengths of rows are counted from."""
        weight_OI = self.adapted.layer._parameters["weight"]
        assert weight_OI is not None
        return row_norms(weight_OI)


def module_key(name: str) -> str:
    """The name in a file of a tensor of a module that is trained as it is."""
    return f"{_PREFIX}{name}"


def kind(adapter: object) -> str | None:
    """What the layout calls an adapter; `None` if it has no name for it."""
    match adapter:
        case LoraAdapter():
            return "LoRA"
        case DoraAdapter():
            return "DoRA"
        case _:
            return None


def adapter_config(layers: Mapping[str, LowRank], modules: Sequence[str], *, is_dora: bool) -> dict[str, object]:
    """The configuration that `peft` needs to apply adapters; what most layers have is the default.

    Args:
        layers: What each layer has, by its name in the base checkpoint; not empty.
        modules: Names of modules that are trained as they are.
        is_dora: Whether the adapters are those of DoRA.
    """
    is_stabilized = all(low_rank.rank_stabilized for low_rank in layers.values())
    ranks = {name: low_rank.rank for name, low_rank in layers.items()}
    # An alpha that gives the layer's scale under the one rule that a file has.
    alphas = {
        name: low_rank.alpha if low_rank.rank_stabilized == is_stabilized else low_rank.scaling * low_rank.rank
        for name, low_rank in layers.items()
    }
    rank, alpha = _most_common(ranks.values()), _most_common(alphas.values())
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "target_modules": list(layers),
        "modules_to_save": list(modules) or None,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": _most_common([low_rank.dropout for low_rank in layers.values()]),
        "bias": "none",
        "fan_in_fan_out": False,
        "rank_pattern": {re.escape(name): value for name, value in ranks.items() if value != rank},
        "alpha_pattern": {re.escape(name): value for name, value in alphas.items() if value != alpha},
        "use_rslora": is_stabilized,
        "use_dora": is_dora,
    }


def read_config(text: str, *, origin: str, is_dora: bool) -> dict[str, Any]:
    """Read a configuration, and refuse adapters of another kind.

    Args:
        text: What the file holds.
        origin: Its name, for the message.
        is_dora: Whether the model's adapters are those of DoRA.

    Raises:
        UserError: If it is no JSON, or of adapters that the model does not have.
    """
    try:
        config = json.loads(text)
    except ValueError as error:
        raise UserError(f"{origin} is no JSON: {error}.") from error
    if not isinstance(config, dict) or not {"r", "lora_alpha"} <= config.keys():
        raise UserError(f"{origin} has no r and lora_alpha; expected the configuration of a LoRA adapter.")
    expected = {"peft_type": "LORA", "use_dora": is_dora, "bias": "none"}
    got = {key: config.get(key) or value for key, value in (expected | {"use_dora": False}).items()}
    unknown = [key for key in _UNKNOWN_OPTIONS if config.get(key)]
    if got != expected or unknown:
        raise UserError(
            f"{origin} says {got | {key: config[key] for key in unknown}}; expected {expected}, as in the model. "
            "Inject what the adapters were trained with, and convert what there is no method for to plain LoRA first."
        )
    return config


def refuse_other_scale(config: Mapping[str, Any], name: str, low_rank: LowRank, *, origin: str) -> None:
    """Refuse a layer that is scaled by another factor than a configuration says.

    Raises:
        UserError: With the options that would fit.
    """
    rank = _by_pattern(config.get("rank_pattern"), name, config["r"])
    alpha = _by_pattern(config.get("alpha_pattern"), name, config["lora_alpha"])
    stored = LowRank(rank=rank, alpha=alpha, rank_stabilized=bool(config.get("use_rslora")))
    if not math.isclose(stored.scaling, low_rank.scaling, rel_tol=1e-9):
        wanted = "rank_stabilized = True and " if stored.rank_stabilized else ""
        raise UserError(
            f"the adapters in {origin} scale {name} by {stored.scaling:g}; the model's layer by {low_rank.scaling:g}. "
            f"Inject it with {wanted}rank = {rank} and alpha = {alpha:g}."
        )


def _by_pattern(patterns: Mapping[str, _T] | None, name: str, default: _T) -> _T:
    """The value of the first pattern that matches the end of a name, at a dot, as `peft` reads them."""
    matching = (value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", name))
    return next(matching, default)


def _most_common(values: Any) -> Any:
    return Counter(values).most_common(1)[0][0]
