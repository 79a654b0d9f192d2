"""Options of a configuration for any model: frozen parameters, recomputed activations, and autocast."""

import re
from dataclasses import dataclass
from functools import wraps
from typing import Any, final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from d9d_dist import UserError, canonical_name
from d9d_dist.errors import shorten
from d9d_dist.values.recomputation import recompute
from d9d_loop.model.block_lists import blocks_of, has_forward


@final
@dataclass(frozen=True)
class ModelOptions:
    """Changes of a model or pipeline stage after its build.

    Attributes:
        freeze: Regular expressions, searched in the names of parameters to freeze.
        recompute: Regular expression for the whole names of modules, of which the outermost ones with a `forward`
            recompute their activations in backward; "blocks" for the blocks of `block_lists`; `None` for none.
    """

    freeze: tuple[str, ...] = ()
    recompute: str | None = None

    def check(self, model: nn.Module) -> None:
        """Raise `UserError` if a pattern is invalid or matches nothing of the whole model."""
        names = [canonical_name(name) for name, _ in model.named_parameters()]
        for pattern in self.freeze:
            if not any(_compiled(pattern, "freeze").search(name) for name in names):
                raise UserError(
                    f"freeze: {pattern!r} matches no parameter; expected at least one of {shorten(names)}. Correct the "
                    "pattern, which is searched in these names."
                )
        if self.recompute is not None and not self._recomputed(model):
            modules = [name for name, each in model.named_modules() if name and has_forward(each)]
            raise UserError(
                f"activation_checkpointing = {self.recompute!r} matches no module; expected at least one of "
                f"{shorten(modules)}. Correct the pattern, which must match a whole name, or name blocks of a list."
            )

    def apply(self, model: nn.Module) -> None:
        """Change a model or stage, in place."""
        for name, parameter in model.named_parameters():
            if any(re.search(pattern, canonical_name(name)) for pattern in self.freeze):
                parameter.requires_grad_(False)
        for module in self._recomputed(model):
            recompute(module)

    def _recomputed(self, model: nn.Module) -> list[nn.Module]:
        if self.recompute is None or self.recompute == "blocks":
            return [] if self.recompute is None else blocks_of(model)
        pattern, inside = _compiled(self.recompute, "activation_checkpointing"), set[nn.Module]()
        found: list[nn.Module] = []
        for name, module in model.named_modules():
            if module not in inside and pattern.fullmatch(name) and has_forward(module):
                found.append(module)
                inside |= {*module.modules()}
        return found


def _compiled(pattern: str, key: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UserError(f"{key}: {pattern!r} is not a regular expression: {error}.") from None


def autocast_stage(stage: nn.Module, device: torch.device, *, is_last: bool) -> None:
    """Run the forward of a stage under `torch.autocast` in bfloat16. Outputs of the last stage are float32."""
    forward = stage.forward

    @wraps(forward)
    def autocast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            outputs = forward(*args, **kwargs)
        is_half = (torch.bfloat16, torch.float16)
        return pytree.tree_map_only(torch.Tensor, lambda x: x.float() if is_last and x.dtype in is_half else x, outputs)

    stage.forward = autocast
