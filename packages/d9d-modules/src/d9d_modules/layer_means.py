"""What every layer makes of a text: the mean of its output over the tokens, gathered on the way through all stages.

Representations from the middle of a model are often better than those of its end; keeping all hidden states to choose
from would cost as much memory as training does.

Shape legend: N layers so far, B batch, L length, D hidden size.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

from d9d_modules.pooling import check_mask, masked_mean


class LayerMeans(NamedTuple):
    """The means of all layers so far: a tree of tensors, so that it crosses the boundaries of stages as it is.

        means = LayerMeans.start(mask_BL, hidden_BLD)       # on the first stage
        for layer in layers:
            hidden_BLD = layer(hidden_BLD, rotary)
            means = means.add(hidden_BLD)
        return hidden_BLD, means

    A model that gathers nothing carries nothing. Where context-parallel ranks share rows out, each would gather the
    means of its part: a model with these says so by `d9d_dist.NeedsWholeRows`.

    Attributes:
        mask_BL: Where there is a token [B, L], bool.
        means_NBD: Mean over the tokens of each layer's output [N, B, D], in the dtype of the hidden states.
    """

    mask_BL: Tensor  # noqa: N815
    means_NBD: Tensor  # noqa: N815

    @staticmethod
    def start(mask_BL: Tensor, hidden_BLD: Tensor) -> "LayerMeans":
        """No layers yet.

        Args:
            mask_BL: Where there is a token [B, L], bool or 0 and 1.
            hidden_BLD: Hidden states as the layers will give them [B, L, D]; only their shape and dtype count.

        Raises:
            UserError: If the mask does not fit the hidden states.
        """
        check_mask(mask_BL, hidden_BLD)
        batch, _, hidden_size = hidden_BLD.shape
        return LayerMeans(mask_BL.bool(), hidden_BLD.new_zeros(0, batch, hidden_size))

    def add(self, hidden_BLD: Tensor) -> "LayerMeans":
        """With the output [B, L, D] of one more layer.

        Raises:
            UserError: If the mask does not fit the hidden states.
        """
        check_mask(self.mask_BL, hidden_BLD)
        mean_1BD = masked_mean(hidden_BLD, self.mask_BL).unsqueeze(0)
        return LayerMeans(self.mask_BL, torch.cat((self.means_NBD, mean_1BD)))


# Stages on other ranks learn of the structure of what they get by this name.
_pytree._register_namedtuple(LayerMeans, serialized_type_name="d9d_modules.LayerMeans")
