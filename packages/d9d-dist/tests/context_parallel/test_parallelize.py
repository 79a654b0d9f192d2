import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_dist import MeshConfig, UserError
from d9d_dist.context_parallel.attention import Attention, sdpa_attention
from d9d_dist.context_parallel.parallelize import HasAttention, context_parallel_attention, parallelize_context
from d9d_dist.context_parallel.ring import RingAttention
from d9d_dist.context_parallel.split import ContextSplit
from d9d_dist.testing import Device, run_ranks

ContextMethod = Literal["all_gather", "all_to_all", "ring"]
METHODS: list[ContextMethod] = ["all_gather", "all_to_all", "ring"]


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    head_dim: int
    rows: int = 2
    has_documents: bool = False
    dtype: torch.dtype = torch.float64


CASES = [
    Case(4, 2, 8),
    Case(4, 2, 5, has_documents=True),
    Case(4, 4, 16, rows=1),
    Case(8, 1, 3, rows=3),
    Case(8, 1, 8, rows=3, has_documents=True),
    Case(4, 2, 8, dtype=torch.bfloat16),
    Case(4, 2, 8, dtype=torch.bfloat16, has_documents=True),
]


def _inputs(case: Case, length: int) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """Return q, k and v of whole rows, the gradient of the output, and document ids of documents of uneven lengths."""
    generator = torch.Generator().manual_seed(case.heads * length + case.head_dim)
    shape = (case.rows, length, case.heads, case.head_dim)
    kv_shape = (case.rows, length, case.kv_heads, case.head_dim)
    q, k, v, grad = (
        torch.randn(s, dtype=torch.float64, generator=generator).to(case.dtype)
        for s in (shape, kv_shape, kv_shape, shape)
    )
    documents = (torch.rand(case.rows, length, generator=generator) < 0.15).cumsum(dim=1)
    return [q, k, v], grad, documents if case.has_documents else None


def _naive(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    """Compute softmax attention over whole rows, with all scores in one tensor."""
    repeats, length = q.shape[2] // k.shape[2], q.shape[1]
    k, v = k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2)
    seen = torch.ones(length, length).tril().bool()
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    scores = torch.einsum("blhk,bshk->bhls", q, k) / q.shape[3] ** 0.5
    return torch.einsum("bhls,bshk->blhk", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def _expected(case: Case, length: int) -> list[Tensor]:
    inputs, grad, documents = _inputs(case, length)
    leaves = [x.double().requires_grad_() for x in inputs]
    out = _naive(*leaves, documents)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]


def _positions(rank: int, num_ranks: int, length: int) -> list[int]:
    size = length // (2 * num_ranks)
    last = 2 * num_ranks - 1 - rank
    return [*range(rank * size, (rank + 1) * size), *range(last * size, (last + 1) * size)]


def _on_ranks(method: ContextMethod, cases: list[Case], length: int) -> list[list[Tensor]]:
    """Return this rank's part of the output and of the gradients of q, k and v, for each case."""
    results = []
    with MeshConfig(context_parallel_shard=-1).build() as ctx:
        attention = context_parallel_attention(sdpa_attention, ctx.mesh_for("batch")["cp"], method=method)
        own = torch.tensor(_positions(ctx.rank, ctx.world_size, length))
        for case in cases:
            inputs, grad, documents = _inputs(case, length)
            q, k, v = (x[:, own].to(ctx.device).requires_grad_() for x in inputs)
            documents = None if documents is None else documents[:, own].to(ctx.device)
            out = attention(q, k, v, documents_BS=documents)
            gradients = torch.autograd.grad(out, (q, k, v), grad[:, own].to(ctx.device))
            assert all(x.dtype == case.dtype for x in (out, *gradients))
            results.append([x.detach().cpu() for x in (out, *gradients)])
    return results


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=pytest.mark.world_size(n)) for n in (4, 8))])
@pytest.mark.slow("cpu-8-all_gather", "cpu-8-ring")
def test_context_parallel_attention_equals_one_process(method: ContextMethod, world_size: int, device: Device) -> None:
    length = 6 * world_size
    cases = [c for c in CASES if c.heads % world_size == 0 or method != "all_to_all"]
    ranks = run_ranks(_on_ranks, method, cases, length, world_size=world_size, device=device)
    for index, case in enumerate(cases):
        for name, expected, *parts in zip(
            ("out", "q", "k", "v"), _expected(case, length), *(rank[index] for rank in ranks), strict=True
        ):
            got = torch.empty_like(expected)
            for rank, part in enumerate(parts):
                got[:, _positions(rank, world_size, length)] = part.double()
            error = (got - expected).norm() / expected.norm()
            assert error < (1e-12 if case.dtype == torch.float64 else 2e-2), (case, name)


class _Block(nn.Module):
    """A small causal decoder layer whose attention function can be replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_function: Attention = sdpa_attention
        self.norm = nn.LayerNorm(12)
        self.qkv, self.out = nn.Linear(12, 6 * 4 + 2 * 2 * 4), nn.Linear(6 * 4, 12)
        self.feed_forward = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12))

    def forward(self, x: Tensor, documents: Tensor | None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (-1, 4)).split([6, 2, 2], dim=2)
        x = x + self.out(self.attention_function(q, k, v, documents_BS=documents).flatten(2))
        return x + self.feed_forward(x)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(11, 12), nn.Embedding(24, 12)
        self.blocks = [_Block() for _ in range(2)]
        self.layers = nn.ModuleList(self.blocks)
        self.head = nn.Linear(12, 11)
        self.double()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.tokens(batch["tokens"]) + self.positions(batch["positions"])
        for layer in self.layers:
            x = layer(x, batch["documents"])
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum")


def _batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 11, (3, 25), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, -5:] = -100
    documents = torch.tensor([[0] * 24, [0] * 5 + [1] * 19, [2] * 13 + [3] * 10 + [4]])
    return {"tokens": tokens[:, :-1], "labels": labels, "documents": documents}


def _train(method: ContextMethod) -> tuple[Tensor, dict[str, Tensor]]:
    with MeshConfig(context_parallel_shard=-1).build() as ctx:
        mesh = ctx.mesh_for("batch")["cp"]
        model = _Model().to(ctx.device)
        parallelize_context(model, mesh, method=method)
        split = ContextSplit(mesh)
        batch = split.split({name: tensor.to(ctx.device) for name, tensor in _batch().items()})
        loss = model({**batch, "positions": split.positions(24)})
        loss.backward()
        total = loss.detach()
        dist.all_reduce(total)
        gradients = {}
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            gradients[name] = parameter.grad.cpu()
        return total.cpu(), gradients


@pytest.mark.parametrize(("method", "world_size"), [("all_gather", 4), ("all_to_all", 2), ("ring", 4)])
def test_a_context_parallel_model_trains_like_one_process(method: ContextMethod, world_size: int) -> None:
    model = _Model()
    expected = model({**_batch(), "positions": torch.arange(24).unsqueeze(0)})
    expected.backward()
    for loss, gradients in run_ranks(_train, method, world_size=world_size):
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-13, atol=0)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert (gradients[name] - parameter.grad).norm() <= 1e-12 * parameter.grad.norm(), name


def test_one_rank_leaves_the_attention_unchanged() -> None:
    with MeshConfig().build() as ctx:
        model = _Model()
        parallelize_context(model, ctx.mesh_for("batch")["cp"], method="ring")
        functions = [each.attention_function for each in model.modules() if isinstance(each, HasAttention)]
        assert functions == [sdpa_attention, sdpa_attention]
        model.layers.append(_Recurrence())
        for each in (model, _Recurrence()):
            parallelize_context(each, ctx.mesh_for("batch")["cp"])


def _other_attention(q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, *, documents_BS: Tensor | None = None) -> Tensor:
    return sdpa_attention(q_BLHK, k_BSGK, v_BSGK, documents_BS=documents_BS)


class _Declared:
    """A user's attention function that declares to compute the same as `sdpa_attention`."""

    def __init__(self, *, is_standard_sdpa: bool, is_causal: bool = True) -> None:
        self.is_standard_sdpa = is_standard_sdpa
        self.is_causal = is_causal

    def __call__(self, q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, *, documents_BS: Tensor | None = None) -> Tensor:
        return sdpa_attention(q_BLHK, k_BSGK, v_BSGK, documents_BS=documents_BS)


class _Recurrence(nn.Module):
    full_sequence_reason = "reads from left to right"


class _AttentionModule(nn.Module):
    forward = staticmethod(_other_attention)


def _messages() -> list[str]:
    with MeshConfig(context_parallel_shard=-1).build() as ctx:
        mesh = ctx.mesh_for("batch")["cp"]
        model, twice, other = _Model(), _Model(), _Model()
        parallelize_context(twice, mesh)
        half_other = _Model()
        half_other.blocks[1].attention_function = _other_attention
        not_plain, hybrid, bidirectional = _Model(), _Model(), _Model()
        bidirectional.blocks[1].attention_function = _Declared(is_standard_sdpa=False, is_causal=False)
        not_plain.blocks[1].attention_function = _Declared(is_standard_sdpa=False)
        hybrid.layers.append(_Recurrence())
        other.blocks[1].attention_function = _AttentionModule()
        unknown = "striped"
        calls: list[Callable[[], object]] = [
            lambda: parallelize_context(nn.Linear(1, 1), mesh),
            lambda: parallelize_context(twice, mesh, method="ring"),
            lambda: parallelize_context(half_other, mesh, method="ring"),
            lambda: parallelize_context(not_plain, mesh, method="ring"),
            lambda: parallelize_context(bidirectional, mesh),
            lambda: parallelize_context(hybrid, mesh),
            lambda: parallelize_context(other, mesh),
            lambda: parallelize_context(model, mesh, method=unknown),  # ty: ignore[invalid-argument-type]
            lambda: parallelize_context(model, ctx.mesh_for("batch")),
            *(
                functools.partial(
                    context_parallel_attention(sdpa_attention, mesh, method=method),
                    *(torch.zeros(1, 3, 2, 4, device=ctx.device) for _ in range(3)),
                )
                for method in METHODS
            ),
        ]
        messages = []
        for call in calls:
            with pytest.raises(UserError) as caught:
                call()
            messages.append(str(caught.value))
        declared = context_parallel_attention(_Declared(is_standard_sdpa=True), mesh, method="ring")
        assert isinstance(declared, RingAttention)
        # The failed call did not replace the attention function.
        for each in (*model.modules(), *hybrid.modules(), half_other.blocks[0], other.blocks[0]):
            assert not isinstance(each, HasAttention) or each.attention_function is sdpa_attention
        return messages


def _messages_of_layers() -> list[str]:
    layers = [nn.Conv1d(4, 4, 3), nn.Conv1d(4, 4, 1), nn.GRU(4, 4), nn.MultiheadAttention(4, 2), nn.MaxPool1d(2)]
    exchanging: Any = nn.Sequential(nn.Conv1d(4, 4, 3))
    exchanging.context_mesh = None
    messages = []
    with MeshConfig(context_parallel_shard=-1).build() as ctx:
        for layer in (*layers, exchanging):
            model = _Model()
            model.layers.append(layer)
            try:
                parallelize_context(model, ctx.mesh_for("batch")["cp"])
                messages.append("")
            except UserError as error:
                messages.append(str(error).partition(" combines positions, but 2 context-parallel ranks")[0])
        assert getattr(exchanging, "context_mesh").size() == 2  # noqa: B009 - the type of None
    return messages


def test_layers_of_torch_that_combine_positions_are_an_error() -> None:
    expected = ["layers.2, a Conv1d,", "", "layers.2, a GRU,", "layers.2, a MultiheadAttention,"]
    expected += ["layers.2, a MaxPool1d,", ""]
    assert run_ranks(_messages_of_layers, world_size=2) == [expected] * 2


def test_invalid_calls_are_refused() -> None:
    odd = "got 3 positions on this rank; expected an even number: .* Split the sequences with ContextSplit"
    expected = [
        "no submodule of Linear is a HasAttention; expected .* attribute attention_function. Add it to your attention",
        "got the attention function AllGatherAttention, which is already context parallel; .* Apply .* once",
        "got the attention function .*_other_attention.* with method = 'ring'; expected sdpa_attention or one whose",
        "got the attention function .*_Declared.* with method = 'ring'; expected sdpa_attention or one whose is_",
        "got the bidirectional attention function .*_Declared.* with method = 'all_gather'; .* Use 'all_to_all'",
        "layers.2, a _Recurrence, reads from left to right, but 2 context-parallel ranks shard each sequence; expected",
        "the attention_function of layers.1 is the module _AttentionModule; expected a function",
        "got method = 'striped'; expected 'all_gather', 'all_to_all' or 'ring'",
        r"got a mesh with the axes \(pp, dp, cp, tp\); expected exactly one. Slice it: mesh\['cp'\]",
        odd,
        odd,
        odd,
    ]
    for messages in run_ranks(_messages, world_size=2):
        for message, pattern in zip(messages, expected, strict=True):
            assert re.search(pattern, message), message
