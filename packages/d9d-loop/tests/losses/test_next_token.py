import torch
from torch.nn import functional as F
from torch.testing import assert_close

from d9d_loop.losses import next_token_loss


def test_the_loss_is_the_cross_entropy_of_the_labels() -> None:
    logits, labels = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    labels[0, 2:] = -100
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    found = next_token_loss(losses, labels)
    assert found.weight == 7
    assert_close(found.total / found.weight, F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
