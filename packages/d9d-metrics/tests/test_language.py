import math

import pytest
import torch
from torch.nn import functional as F

from d9d_metrics import BitsPerByte, Perplexity


def test_bits_per_byte_of_a_uniform_guess_over_bytes_is_eight() -> None:
    metric = BitsPerByte()
    for num_bytes in (3, 5):
        targets = torch.arange(num_bytes)
        nats = F.cross_entropy(torch.zeros(num_bytes, 256, dtype=torch.float64), targets, reduction="sum")
        metric.update(nats, num_bytes)
    assert metric.compute().item() == pytest.approx(8.0, rel=1e-15)


def test_perplexity_pools_tokens_before_the_exponential() -> None:
    metric = Perplexity()
    metric.update(3 * math.log(2), 3)
    metric.update(1 * math.log(32), 1)
    assert metric.compute().item() == pytest.approx(4.0, rel=1e-15)


def test_without_data_bits_per_byte_is_zero_and_perplexity_is_one() -> None:
    assert BitsPerByte().compute().item() == 0.0
    assert Perplexity().compute().item() == 1.0
