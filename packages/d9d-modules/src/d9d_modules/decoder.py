"""One layer of a pre-norm decoder, open at both of its blocks: any attention, any feed-forward."""

from typing import final

from torch import Tensor, nn

from d9d_modules.norm import RMSNorm
from d9d_modules.rope import RotaryTables


@final
class DecoderLayer(nn.Module):
    """`h = x + attention(norm(x))`, then `h + feed_forward(norm(h))`.

    Args:
        hidden_size: Size of the last dim of input and output.
        attention: Called with hidden states [B, L, D], the rotary tables, and `documents_BL` by name where there are
            documents; returns [B, L, D].
        feed_forward: Called with hidden states [B, L, D]; returns [B, L, D].
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

    def forward(self, x_BLD: Tensor, rotary: RotaryTables, *, documents_BL: Tensor | None = None) -> Tensor:
        """Map hidden states to the same shape and dtype.

        Args:
            x_BLD: Hidden states [B, L, D].
            rotary: Tables of the positions.
            documents_BL: Which document each position belongs to [B, L], integers; None: each row is one.
        """
        # An attention that knows nothing of documents serves as long as there are none.
        documents = {} if documents_BL is None else {"documents_BL": documents_BL}
        attention_BLD = self.attention(self.attention_norm(x_BLD), rotary, **documents)
        # Autocast and attention blocks of one's own may compute in another dtype than that of the residual stream.
        normed_BLD, attended_BLD = self.feed_forward_norm(attention_BLD.to(x_BLD.dtype), x_BLD)
        return attended_BLD + self.feed_forward(normed_BLD)
