from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from d9d_modules import AttentionOptions, EagerBackend


def _one_query_at_a_time(
    qkv: list[Tensor], *, options: AttentionOptions, documents_BS: Tensor | None, sinks_H: Tensor | None
) -> Tensor:
    q, k, v = qkv
    before, group = k.shape[1] - q.shape[1], q.shape[2] // k.shape[2]
    out = torch.zeros_like(q)
    for row, query, head in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        now = before + query
        keys = [j for j in range(now + 1) if options.window is None or now - j < options.window]
        keys = [j for j in keys if documents_BS is None or documents_BS[row, j] == documents_BS[row, now]]
        scores = k[row, keys, head // group] @ q[row, query, head] * (options.scale or q.shape[3] ** -0.5)
        if options.softcap is not None:
            scores = (scores / options.softcap).tanh() * options.softcap
        weights = scores.exp()
        total = weights.sum() + (0.0 if sinks_H is None else sinks_H[head].exp())
        out[row, query, head] = weights / total @ v[row, keys, head // group]
    return out


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    heads=st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    lengths=st.sampled_from([(1, 1), (5, 5), (2, 6), (1, 4)]),
    options=st.builds(
        AttentionOptions,
        window=st.sampled_from([None, 1, 3, 9]),
        scale=st.sampled_from([None, 0.7]),
        softcap=st.sampled_from([None, 1.5]),
    ),
    has=st.tuples(st.booleans(), st.booleans()),
)
def test_eager_equals_a_loop_over_queries(
    seed: int, heads: tuple[int, int], lengths: tuple[int, int], options: AttentionOptions, has: tuple[bool, bool]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, lengths[0], heads[0], 5)] + 2 * [(2, lengths[1], heads[1], 5)]
    qkv = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    documents, sinks = torch.randint(0, 3, (2, lengths[1]), generator=generator), torch.randn(heads[0]).double()
    rest: dict[str, Any] = {
        "options": options,
        "documents_BS": documents if has[0] else None,
        "sinks_H": sinks if has[1] else None,
    }
    got, expected = EagerBackend().attend(*qkv, **rest), _one_query_at_a_time(qkv, **rest)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 6, heads, 8).to(dtype) for heads in (4, 2, 2))

    def attend(*inputs: Tensor) -> Tensor:
        return EagerBackend().attend(*inputs, options=AttentionOptions(), documents_BS=None, sinks_H=None)

    assert torch.equal(attend(q, k, v), attend(q.float(), k.float(), v.float()).to(dtype))
