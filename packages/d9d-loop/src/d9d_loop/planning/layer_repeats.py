"""Repeated layers of a model: which layers are identical, and copies of the model with fewer of them.

The cost of a step is linear in the number of identical layers, so `dry_runs.py` records a copy with four of them
instead of the whole model.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, final

from torch import nn

from d9d_dist import DistributedContext, StageInfo
from d9d_loop.model.block_lists import Layers, block_lists
from d9d_loop.model.model_provider import ModelProvider

OnLayers = Callable[[Sequence[nn.Module], Sequence[nn.Module]], None]
_MAX_PERIOD = 8


@dataclass(frozen=True, slots=True)
class Repeats:
    """Longest repeated part of a list of layers: from index `start`, `count` identical blocks of `period` layers."""

    start: int
    period: int
    count: int


def repeats_of(layers: Layers) -> Repeats:
    """Return the longest part of the layers that repeats, with the shortest period."""
    described = [_describe(layer) for layer in layers.children()]
    best, num = Repeats(0, 1, min(1, len(described))), len(described)
    for period in range(1, min(_MAX_PERIOD, num // 2) + 1):
        start = 0
        while start + period < num:
            end = start
            while end + period < num and _are_equal(described, end, end + period):
                end += 1
            count = (end - start) // period + 1
            if count > 1 and (count - 1) * period > (best.count - 1) * best.period:
                best = Repeats(start, period, count)
            start = end + 1
    return best


def without_repeats(model: nn.Module, drop: int) -> tuple[nn.Module, list[nn.Module], list[nn.Module]]:
    """Copy a model without `drop` of its repeated layer blocks.

    Returns:
        The copy, its layers, and the layers of the third repeat.
    """
    lists = block_lists(model)
    if not lists:
        return copy.deepcopy(model), [], []
    name, layers = next(iter(lists.items()))
    repeats = repeats_of(layers)
    first_dropped = repeats.start + repeats.period * (repeats.count - drop)
    dropped = range(first_dropped, repeats.start + repeats.period * repeats.count)
    memo: dict[int, Any] = {id(layer): None for index, layer in enumerate(layers.children()) if index in dropped}
    copied = copy.deepcopy(model, memo)
    shorter = copied.get_submodule(name)
    kept = {key: layer for key, layer in shorter._modules.items() if layer is not None}
    if isinstance(layers, nn.ModuleList):
        kept = {str(index): layer for index, layer in enumerate(kept.values())}
    shorter._modules.clear()
    shorter._modules.update(kept)
    all_kept = list(shorter.children())
    third = repeats.start + 2 * repeats.period
    return copied, all_kept, all_kept[third : third + repeats.period]


@final
class ShortProvider(ModelProvider):
    """Provider whose stages lack some of their repeated layers.

    Args:
        provider: Provider of the whole model.
        drop: Number of repeated layer blocks that each stage lacks.
        whole: Function that returns a whole stage by its index.
        on_layers: Called with the layers of each parallelized stage, and with their third repeat.
    """

    def __init__(
        self, provider: ModelProvider, drop: int, whole: Callable[[int], nn.Module], on_layers: OnLayers
    ) -> None:
        self._provider, self._drop, self._whole, self._on_layers = provider, drop, whole, on_layers
        self._layers: dict[int, tuple[list[nn.Module], list[nn.Module]]] = {}

    def build(self, stage: StageInfo) -> nn.Module:
        """Return the shorter copy of a stage."""
        module, layers, repeat = without_repeats(self._whole(stage.index), self._drop)
        self._layers[id(module)] = layers, repeat
        return module

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        """Parallelize the copy like the whole stage, and call `on_layers`."""
        self._provider.parallelize(model, ctx)
        self._on_layers(*self._layers[id(model)])


def _describe(layer: nn.Module) -> list[tuple[Any, ...]]:
    return [
        (
            name,
            type(each),
            [(key, tuple(tensor.shape), tensor.dtype) for key, tensor in each.named_parameters(recurse=False)],
            {key: _comparable(value) for key, value in vars(each).items() if not key.startswith("_")},
        )
        for name, each in layer.named_modules()
    ]


def _comparable(value: Any) -> Any:
    """Return a plain value itself, the items of a tuple or dataclass, or the type of any other object."""
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, tuple):
        return tuple(map(_comparable, value))
    if is_dataclass(value):
        return type(value), tuple(_comparable(getattr(value, field.name)) for field in fields(value))
    return type(value)


def _are_equal(described: list[list[tuple[Any, ...]]], a: int, b: int) -> bool:
    """Compare types, shapes and plain attributes of two layers. An attribute with the layer's index may differ."""
    if len(described[a]) != len(described[b]):
        return False
    for left, right in zip(described[a], described[b], strict=True):
        if left[:3] != right[:3] or left[3].keys() != right[3].keys():
            return False
        if any(
            one != other and not (type(one) is type(other) is int and other - one == b - a)
            for one, other in zip(left[3].values(), right[3].values(), strict=True)
        ):
            return False
    return True
