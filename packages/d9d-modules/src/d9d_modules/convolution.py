"""Short causal depthwise convolution for linear-attention layers.

Shape legend: B batch, L length, D features, W kernel width.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_dist.errors import UserError
from d9d_dist.values.parameter_role import ParameterRole
from d9d_modules.attention_backends.visibility import check_documents, document_starts


@final
class CausalConvolution(nn.Module):
    """`causal_convolution` with a learnable weight [D, W], initialized like a depthwise `torch.nn.Conv1d`.

    Features are independent, so tensor parallelism can shard the weight by heads (`HeadParallel`).

    Each output depends on its position and the `width - 1` positions before it.
    """

    parameter_roles: ClassVar[Mapping[str, ParameterRole]] = MappingProxyType({"weight": "filter"})

    def __init__(self, num_features: int, *, width: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_features, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight uniformly from [-1/sqrt(width), 1/sqrt(width)]."""
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x_BLD: Tensor, *, document_ids_BL: Tensor | None = None) -> Tensor:
        """See `causal_convolution`."""
        return causal_convolution(x_BLD, self.weight, document_ids_BL=document_ids_BL)


def causal_convolution(x_BLD: Tensor, weight_DW: Tensor, *, document_ids_BL: Tensor | None = None) -> Tensor:
    """Compute `y[t] = sum over i < W of weight[:, W - 1 - i] * x[t - i]`, with zeros before the first position.

    The result has the shape [B, L, D] and the floating-point dtype of the input, rounded once. `document_ids_BL` is the
    document id of each position, integer: positions of other documents count as zero. None: each row is one document.

    Raises:
        UserError: If the last dim of `x_BLD` is not D, or the document ids are not integers [B, L].
    """
    if x_BLD.shape[-1] != len(weight_DW):
        raise UserError(
            f"a causal convolution of {len(weight_DW)} features got a tensor of shape {tuple(x_BLD.shape)}; expected "
            f"a last dim of {len(weight_DW)}."
        )
    check_documents(document_ids_BL, x_BLD.shape[:2])
    # F.conv1d supports neither documents nor empty rows. On meta, where FLOPs are counted, documents do not matter.
    if (document_ids_BL is not None and not x_BLD.is_meta) or x_BLD.shape[1] == 0:
        return _by_shifts(x_BLD, weight_DW, document_ids_BL)
    padded_BDL = F.pad(x_BLD.transpose(1, 2), (weight_DW.shape[1] - 1, 0))
    return F.conv1d(padded_BDL, weight_DW.unsqueeze(1), groups=len(weight_DW)).transpose(1, 2)


def _by_shifts(x_BLD: Tensor, weight_DW: Tensor, document_ids_BL: Tensor | None) -> Tensor:
    """Compute the convolution as a sum of `width` shifted products."""
    dtype = torch.promote_types(x_BLD.dtype, torch.float32)
    (length, width), weight_DW = (x_BLD.shape[1], weight_DW.shape[1]), weight_DW.to(dtype)
    padded_BLD = F.pad(x_BLD.to(dtype), (0, 0, width - 1, 0))
    run_BL = None if document_ids_BL is None else document_starts(document_ids_BL).cumsum(dim=1)
    total_BLD = x_BLD * weight_DW[:, -1]
    for back in range(1, width):
        before_BLD = padded_BLD.narrow(1, width - 1 - back, length)
        if run_BL is not None:
            run_before_BL = F.pad(run_BL, (back, 0))[:, :length]
            before_BLD = before_BLD.masked_fill((run_before_BL != run_BL).unsqueeze(-1), 0.0)
        total_BLD = total_BLD + before_BLD * weight_DW[:, width - 1 - back]
    return total_BLD.to(x_BLD.dtype)
