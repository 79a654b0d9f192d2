"""Dtypes of computation and of gradient reduction."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from d9d_dist.errors import check_choice

if TYPE_CHECKING:
    import torch

PrecisionName: TypeAlias = Literal["auto", "parameters", "bfloat16", "autocast"]
"""Dtype in which a job computes: the parameters' dtype, bfloat16, or (auto) bfloat16 on accelerators only.

autocast: each operator in the dtype that `torch.autocast` chooses for bfloat16, with parameters in their own dtype."""


@dataclass(frozen=True, slots=True)
class Precision:
    """dtypes of data parallelism; `None` keeps the parameter's own dtype.

    Attributes:
        compute: dtype of parameters in forward and backward.
        reduce: dtype in which gradients are reduced over ranks.
        cast_inputs: True to cast floating-point inputs of forward to the compute dtype. Use False for inner blocks with
            float32 tables as inputs, such as rotary embeddings.
    """

    compute: "torch.dtype | None" = None
    reduce: "torch.dtype | None" = None
    cast_inputs: bool = True


def precision_of_job(name: PrecisionName, device: "torch.device") -> Precision | None:
    """Return the precision for a name on a device; `None` to gather and reduce in the dtype of the parameters.

    With bfloat16, parameters and optimizer state keep their dtype, and gradients are reduced in float32. An unknown
    name raises `UserError`.
    """
    check_choice("precision", name, PrecisionName)
    import torch  # noqa: PLC0415 - configurations need no torch

    if name in ("parameters", "autocast") or (name == "auto" and device.type == "cpu"):
        return None
    return Precision(compute=torch.bfloat16, reduce=torch.float32)
