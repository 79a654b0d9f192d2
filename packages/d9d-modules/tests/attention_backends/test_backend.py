from typing import Any

import pytest
import torch

from d9d_dist import UserError
from d9d_modules import AttentionOptions, AttentionRequest
from d9d_modules.attention_backends.backend import request_of

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, r"window = 0; expected above 0, or None\."),
        ({"scale": -1.0}, r"scale = -1\.0; expected above 0, or None\."),
        ({"softcap": 0.0}, r"softcap = 0\.0; expected above 0, or None\."),
    ],
)
def test_options_out_of_range_raise(options: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        AttentionOptions(**options)  # ty: ignore[invalid-argument-type]


def test_standard_sdpa_has_no_options() -> None:
    assert AttentionOptions().is_standard_sdpa
    one_each: list[dict[str, Any]] = [{"window": 1}, {"scale": 1.0}, {"softcap": 1.0}, {"is_causal": False}]
    for options in (AttentionOptions(**each) for each in one_each):
        assert not options.is_standard_sdpa


def test_a_window_that_covers_the_row_is_dropped() -> None:
    options = AttentionOptions(window=4, scale=0.5)
    assert options.within(4) == AttentionOptions(scale=0.5)
    assert options.within(5) is options


def test_a_request_describes_the_call() -> None:
    q, k, v = (torch.randn(1, length, 2, 8, dtype=torch.float64) for length in (3, 5, 5))
    documents = torch.zeros(1, 5, dtype=torch.int64)
    request = request_of(q, k, v, options=AttentionOptions(window=2), documents_BS=documents, sinks_H=None)
    assert request == AttentionRequest(
        options=AttentionOptions(window=2),
        has_documents=True,
        has_prefix_keys=True,
        needs_gradient=False,
        dtype=torch.float64,
        device=CPU,
        head_dim=8,
    )
    v.requires_grad_()
    assert request_of(q, k, v, options=AttentionOptions(), documents_BS=None, sinks_H=None).needs_gradient
    with torch.no_grad():
        assert not request_of(q, k, v, options=AttentionOptions(), documents_BS=None, sinks_H=None).needs_gradient


def test_the_text_of_a_request_lists_its_features() -> None:
    plain = AttentionRequest(dtype=torch.float32, device=CPU, head_dim=8)
    assert str(plain) == "causal attention (head dim 8, torch.float32, cpu, with backward)"
    full = AttentionRequest(
        options=AttentionOptions(window=4, softcap=30.0),
        has_sinks=True,
        has_documents=True,
        needs_gradient=False,
        dtype=torch.bfloat16,
        device=CPU,
        head_dim=8,
    )
    assert str(full) == (
        "causal attention with a window of 4, a softcap of 30.0, sinks, packed documents "
        "(head dim 8, torch.bfloat16, cpu)"
    )
    masked = AttentionRequest(
        options=AttentionOptions(is_causal=False), has_mask=True, dtype=torch.float32, device=CPU, head_dim=8
    )
    assert str(masked) == "bidirectional attention with a mask (head dim 8, torch.float32, cpu, with backward)"
