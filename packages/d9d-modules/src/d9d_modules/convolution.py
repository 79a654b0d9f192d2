"""Short causal convolution: each feature mixes its last few positions, so that linear attention need not do that.

Shape legend: B batch, L length, D features, W width of the window.
"""

from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_dist.errors import UserError
from d9d_modules._document_starts import document_starts


@final
class CausalConvolution(nn.Module):
    """`causal_convolution` with a weight [D, W] that starts like that of a `torch.nn.Conv1d`.

    Features do not mix, so tensor parallelism can give each rank those of its heads (`HeadParallel`).

    Args:
        num_features: Size of the last dim of input and output.
        width: How many positions are mixed: each one and those before it.
    """

    def __init__(self, num_features: int, *, width: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_features, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight uniformly from between -1/sqrt(width) and 1/sqrt(width)."""
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x_BLD: Tensor, *, documents_BL: Tensor | None = None) -> Tensor:
        """See `causal_convolution`."""
        return causal_convolution(x_BLD, self.weight, documents_BL=documents_BL)


def causal_convolution(x_BLD: Tensor, weight_DW: Tensor, *, documents_BL: Tensor | None = None) -> Tensor:
    """`y[t] = sum over i < W of weight[:, W - 1 - i] * x[t - i]`, where positions before the first one are zero.

    Args:
        x_BLD: What is convolved [B, L, D]; any floating-point dtype.
        weight_DW: The weight [D, W]; its last column belongs to the position itself.
        documents_BL: Which document each position belongs to [B, L], integers: positions of other documents count as
            zero. None: each row is one document.

    Returns:
        A tensor of the shape and dtype of `x_BLD`, rounded once.

    Raises:
        UserError: If the last dim of `x_BLD` is not D.
    """
    if x_BLD.shape[-1] != len(weight_DW):
        raise UserError(
            f"a causal convolution of {len(weight_DW)} features got a tensor of shape {tuple(x_BLD.shape)}; expected "
            f"{len(weight_DW)} as its last dim."
        )
    if documents_BL is not None or x_BLD.shape[1] == 0:  # which torch's own has not, and does not take
        return _by_shifts(x_BLD, weight_DW, documents_BL)
    padded_BDL = F.pad(x_BLD.transpose(1, 2), (weight_DW.shape[1] - 1, 0))
    return F.conv1d(padded_BDL, weight_DW.unsqueeze(1), groups=len(weight_DW)).transpose(1, 2)


def _by_shifts(x_BLD: Tensor, weight_DW: Tensor, documents_BL: Tensor | None) -> Tensor:
    """The sum of the equation, term by term."""
    dtype = torch.promote_types(x_BLD.dtype, torch.float32)
    (length, width), weight_DW = (x_BLD.shape[1], weight_DW.shape[1]), weight_DW.to(dtype)
    padded_BLD = F.pad(x_BLD.to(dtype), (0, 0, width - 1, 0))
    run_BL = None if documents_BL is None else document_starts(documents_BL).cumsum(dim=1)
    total_BLD = x_BLD * weight_DW[:, -1]
    for back in range(1, width):
        before_BLD = padded_BLD.narrow(1, width - 1 - back, length)
        if run_BL is not None:
            run_before_BL = F.pad(run_BL, (back, 0))[:, :length]
            before_BLD = before_BLD.masked_fill((run_before_BL != run_BL).unsqueeze(-1), 0.0)
        total_BLD = total_BLD + before_BLD * weight_DW[:, width - 1 - back]
    return total_BLD.to(x_BLD.dtype)
