"""Supervised fine-tuning and pretraining: cross entropy of the labeled tokens."""

from torch import Tensor

from d9d_loop.data.packed_stream import IGNORED_LABEL
from d9d_loop.task import Loss


def next_token_loss(losses_BL: Tensor, labels_BL: Tensor) -> Loss:
    r"""Return the negative log-likelihood of the labeled tokens, $-\sum_t \log p(y_t \mid y_{<t})$.

    The weight is the number of labels, so that the loss of a step is the mean over all labels of the global batch. A
    mean per rank or per conversation would weigh the tokens of short answers more.

    Args:
        losses_BL: Loss of each position [B, L] in nats, 0 where the label is -100: the output of a language-model head
            with labels.
        labels_BL: Label of each position [B, L], int64; -100 for positions without a loss, such as the prompt tokens of
            packed chats.
    """
    return Loss(losses_BL.sum(), weight=(labels_BL != IGNORED_LABEL).sum())
