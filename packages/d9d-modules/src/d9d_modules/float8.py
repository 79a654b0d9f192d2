"""Float8 training of linear layers with torchao: twice the matmul rate of bfloat16 on accelerators with float8 units.

A float8 matmul rounds both operands, each with its own scales (Micikevicius et al.: "FP8 Formats for Deep Learning",
arXiv:2209.05433). The recipe sets the granularity of the scales, and thus whether results depend on the parallel
layout:

- "rowwise_with_gw_hp": one scale per token and per weight row. The weight-gradient matmul, which sums over tokens, is
  not quantized. Results are the same under data, context and pipeline parallelism.
- "rowwise": the weight-gradient matmul runs in float8 too, with scales over the tokens of a rank.
- "tensorwise": one scale per tensor, over all tokens of a rank. The fastest and least accurate.
"""

from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, TypeAlias, final

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from d9d_dist import DistributedContext, UserError
from d9d_dist.install_hint import install_hint
from d9d_modules.kernel_choice import compute_capability

Float8Recipe: TypeAlias = Literal["rowwise_with_gw_hp", "rowwise", "tensorwise"]
"""Granularity of the float8 scales; torchao's recipe names."""

_MULTIPLE = 16
"""Required divisor of both dims of a weight: the tile size of float8 units."""

_MARK = "_d9d_float8"

_LEAST_CAPABILITY: dict[Float8Recipe, tuple[int, int]] = {
    "rowwise_with_gw_hp": (9, 0),
    "rowwise": (9, 0),
    "tensorwise": (8, 9),
}


@final
class Float8(BaseModel):
    """Configuration of float8 linear layers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: Float8Recipe = Field(
        default="rowwise_with_gw_hp",
        description="Granularity of the float8 scales; rowwise_with_gw_hp is the most accurate.",
    )
    emulate: bool = Field(
        default=False,
        description="Round to float8 but multiply in float32: shows the numerical effect on any device, but is slow.",
    )


def convert_to_float8(module: nn.Module, float8: Float8, ctx: DistributedContext) -> list[str]:
    """Convert the linear layers of a module to float8 matmuls, in place.

    The function converts each `torch.nn.Linear` whose in and out features are multiples of 16. Grouped experts and
    routers are not converted. Pass the decoder layers, because embeddings and heads should stay in high precision.
    Parameter names, initial values and the dtypes of weights, gradients and checkpoints stay the same.

    Call this function before any parallelization; compile afterwards to fuse the rounding with neighboring operators.

    Returns:
        Names of the converted layers.

    Raises:
        UserError: If torchao is not installed, the device has no float8 units, the tensor-parallel degree is above 1, a
            layer is already converted, or no layer can be converted.
    """
    _check_can_multiply(float8, ctx.device)
    if (tp := ctx.size("dense", "tp")) > 1:
        raise UserError(
            f"float8 is enabled with tensor-parallel degree {tp}; expected 1, because scales of weight shards would "
            "make results depend on the layout. Set mesh.tensor_parallel = 1, or disable float8."
        )
    found = {
        name: linear
        for name, linear in module.named_modules()
        if isinstance(linear, nn.Linear) and linear.in_features % _MULTIPLE == linear.out_features % _MULTIPLE == 0
    }
    if again := [name for name, linear in found.items() if _MARK in vars(linear)]:
        raise UserError(
            f"{again[0]} is already converted to float8; expected one conversion. Remove one of the two calls."
        )
    if not found:
        raise UserError(
            f"{type(module).__name__} has no linear layer for float8; expected at least one whose in and out features "
            f"are multiples of {_MULTIPLE}. Change the sizes, or disable float8."
        )
    for linear in found.values():
        _convert(linear, float8)
    return list(found)


def _convert(linear: nn.Linear, float8: Float8) -> None:
    """Add torchao's float8 linear as a base class; the layer keeps its own class and `reset_parameters`."""
    torchao: Any = import_module("torchao.float8")
    config = replace(torchao.Float8LinearConfig.from_recipe_name(float8.recipe), emulate=float8.emulate)
    converted = torchao.convert_to_float8_training(linear, config=config)
    bases: tuple[Any, ...] = (type(converted), type(linear))
    linear.__class__ = type(f"Float8{type(linear).__name__}", bases, {})
    vars(linear).update({name: value for name, value in vars(converted).items() if name not in vars(linear)})
    vars(linear)[_MARK] = float8


def _check_can_multiply(float8: Float8, device: torch.device) -> None:
    if find_spec("torchao") is None:
        hint = install_hint("d9d-modules", "float8")
        raise UserError(f"float8 needs torchao, which is not installed. Install it: {hint}")
    if float8.emulate:
        return
    least = _LEAST_CAPABILITY[float8.recipe]
    capability = compute_capability(device)
    if capability is None or capability < least:
        found = device.type if capability is None else f"{device.type} of capability {capability}"
        raise UserError(
            f"float8 recipe {float8.recipe!r} is enabled on {found}; expected an accelerator of compute capability "
            f"{least[0]}.{least[1]} or higher. Disable float8, or set float8.emulate = true to emulate it (slow)."
        )
