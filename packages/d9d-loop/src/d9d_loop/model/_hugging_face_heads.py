"""Tensors in which a folder and a `transformers` model may differ: those of another head, and a pooler.

`transformers` loads the base model of a folder into any class of the family. The classes say which tensors belong to
the base model and which to a head, so no name of a head is known here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from inspect import signature
from typing import Any, final

import torch


@final
@dataclass(frozen=True, slots=True)
class Accepted:
    """Differences between a folder and a model that are not errors; see `hugging_face_model`."""

    new: Sequence[str] = ()
    unused: Sequence[str] = ()
    new_head: bool = False

    def checks(self, model: Any, config: Any) -> tuple[Callable[[str], bool], Callable[[str], bool]]:
        """Return two functions of a tensor name: True if it may be new, and True if it may be unused."""
        is_new_head = is_other_head = _never
        if self.new_head:
            is_new_head, is_other_head = _head_checks(model, config)
        return (
            lambda name: any(fnmatchcase(name, pattern) for pattern in self.new) or is_new_head(name),
            lambda name: any(fnmatchcase(name, pattern) for pattern in self.unused) or is_other_head(name),
        )


def _never(name: str) -> bool:
    del name
    return False


def _head_checks(model: Any, config: Any) -> tuple[Callable[[str], bool], Callable[[str], bool]]:
    base, prefix = model.base_model, f"{model.base_model_prefix}."
    own = _names(base)
    whole = _names(_on_meta(type(base), config))
    # Parts of the base model that only some heads use: a pooler.
    optional = whole ^ _without_pooler(type(base), config) | whole ^ own
    parts = {name for name, _ in base.named_children()} | {name.partition(".")[0] for name in whole}

    def is_new(name: str) -> bool:
        is_head = base is not model and not name.startswith(prefix)
        return is_head or name.removeprefix(prefix) in optional

    def is_unused(name: str) -> bool:
        relative = name.removeprefix(prefix)
        return relative.partition(".")[0] not in parts or (relative in optional and relative not in own)

    return is_new, is_unused


def _names(model: Any) -> set[str]:
    return set(model.state_dict())


def _on_meta(model_class: Any, config: Any, **options: Any) -> Any:
    with torch.device("meta"):
        return model_class(config, **options)


def _without_pooler(model_class: Any, config: Any) -> set[str]:
    takes_pooler = "add_pooling_layer" in signature(model_class.__init__).parameters
    return _names(_on_meta(model_class, config, **({"add_pooling_layer": False} if takes_pooler else {})))
