"""Mean of each layer's output over the tokens, collected across pipeline stages.

Representations from middle layers are often better than those of the last layer. Saving the hidden states of all layers
instead of their means would need as much memory as training.

Shape legend: N layers added so far, B batch, L length, D hidden size.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

from d9d_modules.pooling import check_mask, masked_mean


class LayerMeans(NamedTuple):
    """Token means of the layer outputs so far: a pytree of tensors that pipeline stages can send.

        means = LayerMeans.start(mask_BL, hidden_BLD)       # on the first stage
        for layer in layers:
            hidden_BLD = layer(hidden_BLD, rotary)
            means = means.add(hidden_BLD)
        return hidden_BLD, means

    Under context parallelism each rank would average only its part of a row. A model that uses `LayerMeans` must
    therefore implement `d9d_dist.RequiresFullSequence`.

    Attributes:
        mask_BL: Token mask [B, L], bool; False marks padding.
        means_NBD: Mean of each layer's output over the tokens [N, B, D], in the dtype of the hidden states.
    """

    mask_BL: Tensor  # noqa: N815
    means_NBD: Tensor  # noqa: N815

    @staticmethod
    def start(mask_BL: Tensor, hidden_BLD: Tensor) -> "LayerMeans":
        """Create `LayerMeans` without layers (N = 0), from the token mask [B, L], bool or 0 and 1.

        `hidden_BLD` has the shape, dtype and device of the layer outputs [B, L, D]; its values are unused.

        Raises:
            UserError: If the mask does not have the shape [B, L].
        """
        check_mask(mask_BL, hidden_BLD)
        batch, _, hidden_size = hidden_BLD.shape
        return LayerMeans(mask_BL.bool(), hidden_BLD.new_zeros(0, batch, hidden_size))

    def add(self, hidden_BLD: Tensor) -> "LayerMeans":
        """Return a copy with the mean of one more layer output [B, L, D]. Raises the same errors as `start`."""
        check_mask(self.mask_BL, hidden_BLD)
        mean_1BD = masked_mean(hidden_BLD, self.mask_BL).unsqueeze(0)
        return LayerMeans(self.mask_BL, torch.cat((self.means_NBD, mean_1BD)))


# Pipeline stages send this name to describe the pytree structure to the receiving rank.
_pytree._register_namedtuple(LayerMeans, serialized_type_name="d9d_modules.LayerMeans")
