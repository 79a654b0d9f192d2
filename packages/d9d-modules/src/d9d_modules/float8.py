"""Linear layers that multiply in float8, through torchao: twice the rate of bfloat16 on accelerators that have it.

A product in float8 rounds both its factors, each with scales of its own (Micikevicius et al.: "FP8 Formats for Deep
Learning", arXiv:2209.05433). What shares a scale decides in which layouts the rounding is that of one process:

- "rowwise_with_gw_hp": one for each token and for each row of a weight; what adds up over tokens, the gradient of the
  weight, is not rounded. The same under data, context and pipeline parallelism.
- "rowwise": the weight's gradient is rounded too, with scales over the tokens of a rank.
- "tensorwise": one for all tokens of a rank. The fastest, and the coarsest.
"""

from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, TypeAlias, final

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from d9d_dist import DistributedContext, UserError

Float8Recipe: TypeAlias = Literal["rowwise_with_gw_hp", "rowwise", "tensorwise"]
"""What shares a scale; the names are torchao's."""

_MULTIPLE = 16
"""What both sizes of a weight have to be multiples of: the tiles of float8 units."""

_MARK = "_d9d_float8"

_LEAST_CAPABILITY: dict[Float8Recipe, tuple[int, int]] = {
    "rowwise_with_gw_hp": (9, 0),
    "rowwise": (9, 0),
    "tensorwise": (8, 9),
}


@final
class Float8(BaseModel):
    """How linear layers multiply in float8."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: Float8Recipe = Field("rowwise_with_gw_hp", description="What shares a scale; the first is the most exact.")
    emulate: bool = Field(
        False,
        description="Whether to round to float8, but multiply in float32: what it does to a model can be seen on any "
        "device, slowly.",
    )


def multiply_in_float8(module: nn.Module, float8: Float8, ctx: DistributedContext) -> list[str]:
    """Let the linear layers within a module multiply in float8, in place; names and initial values stay.

    Those layers are instances of `torch.nn.Linear` whose sizes are multiples of 16; others are left as they are, and so
    are grouped experts and routers. Master weights, their gradients and what is saved keep their dtype. Call it before
    anything else is done to the module; compile it afterwards, which fuses the rounding with what is around.

    Args:
        module: A part of a model, usually its layers: embeddings and heads are better left out.
        float8: How.
        ctx: The job's context: its device, and its layout.

    Returns:
        The names of these layers.

    Raises:
        UserError: If torchao is not installed, the job's device does not multiply in float8, there is no such layer,
            one multiplies in float8 already, or tensor-parallel ranks share weights out.
    """
    _check_can_multiply(float8, ctx.device)
    if (tp := ctx.size("dense", "tp")) > 1:
        raise UserError(
            f"float8 was asked for beside {tp} tensor-parallel ranks; expected one: scales would follow from a rank's "
            "part of a weight, and numbers from the layout. Set mesh.tensor_parallel = 1, or leave float8 out."
        )
    found = {
        name: linear
        for name, linear in module.named_modules()
        if isinstance(linear, nn.Linear) and linear.in_features % _MULTIPLE == linear.out_features % _MULTIPLE == 0
    }
    if again := [name for name, linear in found.items() if _MARK in vars(linear)]:
        raise UserError(
            f"{again[0]} multiplies in float8 already; expected to be asked once. Leave out this call, or the one "
            "before it."
        )
    if not found:
        raise UserError(
            f"{type(module).__name__} has no linear layer for float8; expected one whose sizes are multiples of "
            f"{_MULTIPLE}. Change the sizes, or leave float8 out."
        )
    for linear in found.values():
        _convert(linear, float8)
    return list(found)


def _convert(linear: nn.Linear, float8: Float8) -> None:
    """Give a layer torchao's forward; it stays an instance of its class, which knows its initial values."""
    torchao: Any = import_module("torchao.float8")
    config = replace(torchao.Float8LinearConfig.from_recipe_name(float8.recipe), emulate=float8.emulate)
    converted = torchao.convert_to_float8_training(linear, config=config)
    bases: tuple[Any, ...] = (type(converted), type(linear))
    linear.__class__ = type(f"Float8{type(linear).__name__}", bases, {})
    vars(linear).update({name: value for name, value in vars(converted).items() if name not in vars(linear)})
    vars(linear)[_MARK] = float8


def _check_can_multiply(float8: Float8, device: torch.device) -> None:
    if find_spec("torchao") is None:
        raise UserError("float8 needs torchao, which is not installed. Install it: pip install 'd9d-modules[float8]'.")
    if float8.emulate:
        return
    least = _LEAST_CAPABILITY[float8.recipe]
    capability = None if device.type == "cpu" else torch.get_device_module(device).get_device_capability(device)
    if not isinstance(capability, tuple) or capability < least:
        found = device.type if capability is None else f"{device.type} of capability {capability}"
        raise UserError(
            f"float8 with the recipe {float8.recipe!r} was asked for on {found}; expected an accelerator of compute "
            f"capability {least[0]}.{least[1]} or more. Leave float8 out, or set float8.emulate = true to see what it "
            "does to the numbers, slowly."
        )
