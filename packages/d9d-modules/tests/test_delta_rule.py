import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from d9d_dist import UserError
from d9d_dist.testing import assert_rounds_like
from d9d_modules import delta_rule
from d9d_modules._fla_delta_rule import why_not_fla
from d9d_modules.delta_rule import gated_delta_rule

BATCH, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 2, 4, 3, 5


def _inputs(length: int, *, dtype: torch.dtype = torch.float64, largest_decay: float = 2.0) -> dict[str, Any]:
    """Return queries, keys, values, log decays, betas and an initial state as autograd leaves."""
    values = {
        "q_BLGK": torch.randn(BATCH, length, KEY_HEADS, KEY_DIM),
        "k_BLGK": torch.nn.functional.normalize(torch.randn(BATCH, length, KEY_HEADS, KEY_DIM), dim=-1),
        "v_BLHV": torch.randn(BATCH, length, HEADS, VALUE_DIM),
        "log_decay_BLH": -largest_decay * torch.rand(BATCH, length, HEADS),
        "beta_BLH": torch.rand(BATCH, length, HEADS),
        "initial_state_BHKV": torch.randn(BATCH, HEADS, KEY_DIM, VALUE_DIM),
    }
    return {name: x.to(dtype).requires_grad_() for name, x in values.items()}


def _wide(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: x.detach().double().requires_grad_() for name, x in inputs.items()}


def _documents(length: int) -> Tensor:
    """One position and several chunks, document boundaries within and between chunks, and a repeated id."""
    first = [3] * 2 + [5] + [3] * 3 + [8] * 20
    second = [0] * 4 + [1] * 8 + [2] * 14
    return torch.tensor([first, second])[:, :length]


def _by_the_paper(documents: Tensor | None = None, **inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Reference: equation 10 as printed in the paper, with the state [V, K]."""
    q, k, v, log_decay, beta = (inputs[name] for name in list(inputs)[:5])
    outs, ends = [], []
    for row in range(BATCH):
        for head in range(HEADS):
            state, group = inputs["initial_state_BHKV"][row, head].T, head * KEY_HEADS // HEADS
            for now in range(q.shape[1]):
                if documents is not None and now and documents[row, now] != documents[row, now - 1]:
                    state = torch.zeros_like(state)
                key, strength = k[row, now, group], beta[row, now, head]
                forget = torch.eye(KEY_DIM, dtype=k.dtype) - strength * torch.outer(key, key)
                state = state @ (log_decay[row, now, head].exp() * forget)
                state = state + strength * torch.outer(v[row, now, head], key)
                outs.append(state @ q[row, now, group] / KEY_DIM**0.5)
            ends.append(state.T)
    out = torch.stack(outs).view(BATCH, HEADS, -1, VALUE_DIM).transpose(1, 2) if outs else torch.empty_like(v)
    return out, torch.stack(ends).view(BATCH, HEADS, KEY_DIM, VALUE_DIM)


def _with_gradients(function: Callable[..., tuple[Tensor, Tensor]], inputs: dict[str, Any], **options: Any) -> Any:
    """Return outputs, final states, and the gradients of all inputs through both."""
    results = function(**inputs, **options)
    directions = [torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x.dtype) for x in results]
    gradients = torch.autograd.grad(results, list(inputs.values()), directions, materialize_grads=True)
    return *results, *gradients


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("backend", ["sequential", "chunked"])
@pytest.mark.parametrize("length", [1, 4, 9])
def test_outputs_states_and_gradients_equal_the_equation_of_the_paper(
    backend: Any, length: int, is_packed: bool
) -> None:
    inputs, documents = _inputs(length), _documents(length) if is_packed else None
    expected = _with_gradients(_by_the_paper, inputs, documents=documents)
    found = _with_gradients(gated_delta_rule, inputs, document_ids_BL=documents, backend=backend, chunk_size=4)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 4, 5, 64])
@pytest.mark.parametrize("length", [0, 1, 12, 26])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_chunks_equal_single_positions(dtype: torch.dtype, length: int, chunk_size: int, is_packed: bool) -> None:
    inputs, documents = _inputs(length, dtype=dtype), _documents(length) if is_packed else None
    expected = _with_gradients(gated_delta_rule, inputs, document_ids_BL=documents, backend="sequential")
    exact = _with_gradients(gated_delta_rule, _wide(inputs), document_ids_BL=documents, backend="sequential")
    found = _with_gradients(gated_delta_rule, inputs, document_ids_BL=documents, chunk_size=chunk_size)
    # In float64 `exact` has rounding errors of its own.
    assert_rounds_like(found, exact, peer=expected, multiple=8 if dtype == torch.float32 else 64)


@pytest.mark.parametrize("backend", ["sequential", "chunked"])
def test_a_row_may_be_continued_from_its_state(backend: Any) -> None:
    inputs = _inputs(11)
    whole, end = gated_delta_rule(**inputs, backend=backend, chunk_size=4)
    state, parts = inputs.pop("initial_state_BHKV"), []
    for part in (slice(0, 6), slice(6, 6), slice(6, 11)):
        now = {name: x[:, part] for name, x in inputs.items()}
        out, state = gated_delta_rule(**now, initial_state_BHKV=state, backend=backend, chunk_size=4)
        parts.append(out)
    torch.testing.assert_close((torch.cat(parts, dim=1), state), (whole, end))


@pytest.mark.parametrize("backend", ["sequential", "chunked"])
def test_documents_are_independent(backend: Any) -> None:
    inputs = _inputs(13)
    del inputs["initial_state_BHKV"]
    documents = torch.tensor([[7] * 5 + [2] * 8] * BATCH)
    found, end = gated_delta_rule(**inputs, document_ids_BL=documents, backend=backend, chunk_size=4)
    parts = [
        gated_delta_rule(**{name: x[:, part] for name, x in inputs.items()}, backend=backend, chunk_size=4)
        for part in (slice(0, 5), slice(5, 13))
    ]
    torch.testing.assert_close(found, torch.cat([out for out, _ in parts], dim=1))
    torch.testing.assert_close(end, parts[-1][1])


def test_small_decays_after_large_ones_are_not_rounded_away() -> None:
    inputs = _inputs(64, dtype=torch.float32, largest_decay=1e-3)
    with torch.no_grad():
        inputs["log_decay_BLH"][:, 5:60:7] -= 3000.0
    exact = _with_gradients(gated_delta_rule, _wide(inputs), backend="sequential")
    expected = _with_gradients(gated_delta_rule, inputs, backend="sequential")
    found = _with_gradients(gated_delta_rule, inputs)
    assert all(x.isfinite().all() for x in found)
    assert_rounds_like(found, exact, peer=expected)


@pytest.mark.parametrize("backend", ["sequential", "chunked"])
def test_bfloat16_is_computed_in_float32_and_rounded_once(backend: Any) -> None:
    inputs = {name: x.detach() for name, x in _inputs(9, dtype=torch.bfloat16).items()}
    out, state = gated_delta_rule(**inputs, backend=backend, chunk_size=4)
    wide, wide_state = gated_delta_rule(
        **{name: x.float() for name, x in inputs.items()}, backend=backend, chunk_size=4
    )
    assert torch.equal(out, wide.bfloat16())
    assert torch.equal(state, wide_state)
    assert state.dtype == torch.float32


class _Bytes(TorchDispatchMode):
    """Count the elements of all allocated tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.total += sum(x.nbytes for x in tree_leaves(results) if isinstance(x, Tensor))
        return results


def test_memory_is_linear_in_the_length() -> None:
    def made(length: int) -> int:
        inputs, documents = _inputs(length), torch.zeros(BATCH, length, dtype=torch.int64)
        with _Bytes() as counter:
            _with_gradients(gated_delta_rule, inputs, document_ids_BL=documents, chunk_size=2)
        return counter.total

    assert made(128) < 2.05 * made(64)


def test_shapes_are_inferred_on_meta() -> None:
    inputs = {name: x.to("meta") for name, x in _inputs(9).items()}
    out, state = gated_delta_rule(**inputs, document_ids_BL=_documents(9).to("meta"), chunk_size=4)
    assert (out.shape, state.shape) == ((BATCH, 9, HEADS, VALUE_DIM), (BATCH, HEADS, KEY_DIM, VALUE_DIM))


def test_a_given_scale_replaces_the_default() -> None:
    inputs = _inputs(5)
    torch.testing.assert_close(gated_delta_rule(**inputs, scale=2.0)[0], gated_delta_rule(**inputs)[0] * 2 * 3**0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_BLGK": torch.zeros(2, 4, 2, 7)}, r"keys \(2, 4, 2, 7\), values .* expected \[B, L, G, K\] twice, \[B, L"),
        ({"beta_BLH": torch.zeros(2, 4, 2)}, r"betas \(2, 4, 2\); expected"),
        ({"log_decay_BLH": torch.zeros(2, 4)}, r"log decays \(2, 4\), betas"),
        ({"q_BLGK": torch.zeros(2, 4, 3, 3), "k_BLGK": torch.zeros(2, 4, 3, 3)}, "got 3 key heads and 4 value heads; "),
        ({"q_BLGK": torch.zeros(2, 4, 2, 3).half()}, r"got dtypes torch.float16, torch.float32 and torch.float32; exp"),
        (
            {"initial_state_BHKV": torch.zeros(2, 4, 5, 3)},
            r"state of shape \(2, 4, 5, 3\); expected \(2, 4, 3, 5\)",
        ),
        (
            {"document_ids_BL": torch.zeros(4)},
            r"got document_ids_BL of shape \(4,\) and dtype torch.float32; expected int",
        ),
        ({"backend": "fast"}, "backend = 'fast'; expected 'sequential', 'chunked', 'fla', or None to select"),
    ],
)
def test_invalid_input_raises(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {**_inputs(4, dtype=torch.float32), **change}
    with pytest.raises(UserError, match=message):
        gated_delta_rule(**arguments)


class _Kernels(ModuleType):
    """Stand-in for `fla.ops.gated_delta_rule`, with the arguments that its version 0.6 has."""

    reference: Any

    def chunk_gated_delta_rule(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, **options: Any) -> Any:
        assert options["output_final_state"]
        assert set(options) == {"g", "beta", "initial_state", "output_final_state"}
        assert options["g"].dtype == torch.float32
        # Its arithmetic is float32, and it scales queries by 1/sqrt(K).
        return self.reference.torch_chunk_gated_delta_rule(q * scale * KEY_DIM**0.5, k, v, **options)


def _install(monkeypatch: pytest.MonkeyPatch, version: str = "0.6.0") -> None:
    from transformers.models.qwen3_next import (
        modeling_qwen3_next,
    )  # imported before the stand-in is installed, which it would use

    package, kernels = ModuleType("fla"), _Kernels("fla.ops.gated_delta_rule")
    kernels.reference = modeling_qwen3_next
    package.__spec__ = ModuleSpec("fla", None)
    monkeypatch.setattr(package, "__version__", version, raising=False)
    monkeypatch.setitem(sys.modules, "fla", package)
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", kernels)


@pytest.mark.parametrize("backend", [None, "fla"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_the_kernels_of_the_package_are_called_with_its_arguments(
    backend: Any, is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(monkeypatch)
    monkeypatch.setattr(delta_rule, "why_not_fla", lambda *_, **__: None)  # as on an accelerator
    inputs, documents = _inputs(26, dtype=torch.float32), _documents(26) if is_packed else None
    with torch.no_grad():
        inputs["log_decay_BLH"][:, 3] = -1e6
    options: dict[str, Any] = {"document_ids_BL": documents, "backend": "sequential", "scale": 0.7}
    exact = _with_gradients(gated_delta_rule, _wide(inputs), **options)
    expected = _with_gradients(gated_delta_rule, inputs, **options)
    found = _with_gradients(gated_delta_rule, inputs, **{**options, "backend": backend})
    # The reference forms decays as differences of sums, here of up to 5 resets of -100: the exponent rounds by 500 eps.
    assert_rounds_like(found, exact, peer=expected, multiple=500)


class _Shape(Tensor):
    """Stand-in for fake tensors, which have no values."""


def test_unsupported_tensors_do_not_use_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_rule, "why_not_fla", lambda *_, **__: None)
    inputs = {name: x.detach() for name, x in _inputs(3).items()}
    expected = gated_delta_rule(**inputs, backend="chunked")[0]
    found = gated_delta_rule(**{name: x.as_subclass(_Shape) for name, x in inputs.items()})[0]
    assert torch.equal(found.as_subclass(Tensor), expected)


class _OnAccelerator:
    """Stand-in for values on an accelerator."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, shape: tuple[int, ...] = (1, 2, 3, 4)) -> None:
        self.dtype, self.shape, self.device = dtype, shape, torch.device("cuda")


def test_rejections_of_the_kernels_state_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def why_not(values: Any, key_dim: int = 128) -> str | None:
        return why_not_fla(values, key_dim=key_dim)

    _install(monkeypatch)
    assert why_not(_OnAccelerator()) is None
    assert why_not(torch.zeros(1, 1, 1, 1)) == "it needs an accelerator, but the values are on cpu"
    assert why_not(_OnAccelerator(torch.float32)) == "it needs bfloat16 or float16, but the values are torch.float32"
    assert why_not(_OnAccelerator(), key_dim=257) == "it supports a key dim of at most 256, not 257"
    assert why_not(_OnAccelerator(shape=(1, 0, 3, 4))) == (
        "it does not support empty tensors, but the values have shape (1, 0, 3, 4)"
    )
    _install(monkeypatch, version="0.4.2")
    assert why_not(_OnAccelerator()) == (
        "version 0.4.2 is installed, 0.6 or later is needed: pip install 'fla-core>=0.6'"
    )


def test_an_unavailable_package_is_an_error_only_if_selected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = _inputs(3)
    monkeypatch.setattr("d9d_modules._fla_delta_rule.find_spec", lambda _: None)
    gated_delta_rule(**inputs)
    with pytest.raises(UserError, match=r"'fla' is not available: it is not installed: pip install 'fla-core>=0\.6'\."):
        gated_delta_rule(**inputs, backend="fla")
    monkeypatch.undo()
    _install(monkeypatch)
    with pytest.raises(
        UserError, match=r"is not available: it needs an accelerator, .* cpu\. Use 'chunked', or None to"
    ):
        gated_delta_rule(**inputs, backend="fla")
