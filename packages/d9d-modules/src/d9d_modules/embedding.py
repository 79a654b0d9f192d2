"""Token embedding: where token ids become vectors."""

from typing import final

from torch import nn


@final
class TokenEmbedding(nn.Embedding):
    """A `torch.nn.Embedding` that starts from `Normal(0, init_std)` instead of `Normal(0, 1)`.

    Args:
        vocab_size: Number of token ids.
        hidden_size: Size of each vector.
        init_std: Standard deviation of the initial weight.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, init_std: float = 0.02) -> None:
        self.init_std = init_std  # before the parent's __init__, which calls reset_parameters
        super().__init__(vocab_size, hidden_size)

    def reset_parameters(self) -> None:
        """Draw the weight from `Normal(0, init_std)`."""
        nn.init.normal_(self.weight, std=self.init_std)
