"""Pre-norm decoder layer with pluggable attention and feed-forward blocks."""

from typing import final

from torch import Tensor, nn

from d9d_modules.norm import RMSNorm
from d9d_modules.rope import RotaryTables


@final
class DecoderLayer(nn.Module):
    """Pre-norm decoder layer: `h = x + attention(norm(x))`, then `h + feed_forward(norm(h))`.

    Args:
        hidden_size: Size of the last dim of input and output.
        attention: Attention block, called with hidden states [B, L, D] and the rotary tables; returns [B, L, D].
            For packed sequences it also receives the keyword argument `document_ids_BL`.
        feed_forward: Feed-forward block, called with hidden states [B, L, D]; returns [B, L, D].
        norm_eps: Epsilon of both RMS norms.
    """

    def __init__(
        self, hidden_size: int, *, attention: nn.Module, feed_forward: nn.Module, norm_eps: float = 1e-6
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(hidden_size, eps=norm_eps)
        self.attention = attention
        self.feed_forward_norm = RMSNorm(hidden_size, eps=norm_eps)
        self.feed_forward = feed_forward

    def forward(self, x_BLD: Tensor, rotary: RotaryTables, *, document_ids_BL: Tensor | None = None) -> Tensor:
        """Apply the layer to hidden states; shape and dtype are unchanged.

        Args:
            x_BLD: Hidden states [B, L, D].
            rotary: Rotary tables of the positions.
            document_ids_BL: Document id of each position [B, L], integer; None: each row is one document.
        """
        # Attention blocks without a `document_ids_BL` argument work as long as no sequences are packed.
        documents = {} if document_ids_BL is None else {"document_ids_BL": document_ids_BL}
        attention_BLD = self.attention(self.attention_norm(x_BLD), rotary, **documents)
        # With autocast, or a custom attention block, the output dtype may differ from the residual stream's.
        normed_BLD, attended_BLD = self.feed_forward_norm(attention_BLD.to(x_BLD.dtype), x_BLD)
        return attended_BLD + self.feed_forward(normed_BLD)
