import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from d9d_dist import MeshConfig, UserError, all_to_all, materialize, sync_gradients
from d9d_dist.testing import assert_trees_close, full_gradients, run_ranks
from d9d_moe import DeepEpDispatcher, LocalDispatcher, MoELayer, SharedExperts, TopKRouter, parallelize_moe
from d9d_moe.deep_ep import deep_ep_buffer
from d9d_moe.router import Routing

NUM_EXPERTS, TOP_K, SIZE = 8, 3, 4


class Event:
    """Event that counts its waits."""

    waited = 0

    def current_stream_wait(self) -> None:
        Event.waited += 1


class StandIn:
    """Implementation of the interface of `deep_ep.Buffer` with torch's collectives, for any dtype."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        num_ranks = self.group.size()
        is_in_rank = torch.zeros(len(topk_idx), num_ranks, dtype=torch.bool)
        is_in_rank.scatter_(1, topk_idx // (num_experts // num_ranks), value=True)
        per_expert = torch.bincount(topk_idx.flatten(), minlength=num_experts)
        return is_in_rank.sum(0), None, per_expert, is_in_rank, Event()

    def dispatch(self, x: Tensor, *, handle: Any = None, **layout: Any) -> tuple[Any, ...]:
        if handle is not None:
            assert not layout
            tokens, leaving, arriving, _ = handle
            return all_to_all(x[tokens], self.group, send_sizes=leaving, receive_sizes=arriving), *[None] * 4, Event()
        is_in_rank = layout["is_token_in_rank"]
        assert layout["num_tokens_per_rdma_rank"] is None
        assert torch.equal(layout["num_tokens_per_rank"], is_in_rank.sum(0))
        ranks, tokens = is_in_rank.T.nonzero().unbind(1)
        leaving = torch.bincount(ranks, minlength=self.group.size())
        sizes = {"send_sizes": leaving.tolist(), "receive_sizes": all_to_all(leaving, self.group).tolist()}
        rows, choices, weights = (
            all_to_all(each[tokens], self.group, **sizes) for each in (x, layout["topk_idx"], layout["topk_weights"])
        )
        per_rank = len(layout["num_tokens_per_expert"]) // self.group.size()
        choices = choices - self.group.rank() * per_rank
        is_here = (choices >= 0) & (choices < per_rank)
        choices = torch.where(is_here, choices, -1)
        counts = [int((choices == expert).sum()) for expert in range(per_rank)]
        return rows, choices, weights * is_here, counts, (tokens, *sizes.values(), len(x)), Event()

    def combine(
        self, x: Tensor, handle: Any, *, topk_weights: Tensor | None = None, async_finish: bool = False
    ) -> tuple[Any, ...]:
        tokens, leaving, arriving, num_tokens = handle

        def summed(each: Tensor) -> Tensor:
            back = all_to_all(each, self.group, send_sizes=arriving, receive_sizes=leaving)
            return back.new_zeros(num_tokens, each.shape[1]).index_add(0, tokens, back)

        return summed(x), None if topk_weights is None else summed(topk_weights), Event()


def _case(kind: str, rank: int) -> tuple[Tensor, Routing, Tensor]:
    """Return the tokens of a rank, their routing, and the output gradient, in float64."""
    draws = torch.Generator().manual_seed(10 + rank)
    num_tokens = {"random": 3 + 2 * rank, "no tokens": 4 * rank, "one rank": 5, "every rank": 5}[kind]
    tokens, gradient = torch.randn(2, num_tokens, SIZE, generator=draws, dtype=torch.float64)
    choices = [torch.randperm(NUM_EXPERTS, generator=draws)[:TOP_K] for _ in range(num_tokens)]
    indices = torch.stack(choices) if choices else torch.zeros(0, TOP_K, dtype=torch.int64)
    if kind in ("one rank", "every rank"):
        indices = torch.tensor([[2, 0, 3] if kind == "one rank" else [7, 0, 4]]).repeat(num_tokens, 1)
    return tokens, Routing(indices, torch.rand(num_tokens, TOP_K, generator=draws, dtype=torch.float64)), gradient


def _scales() -> Tensor:
    return torch.randn(NUM_EXPERTS, SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _through(dispatcher: DeepEpDispatcher | LocalDispatcher, kind: str, rank: int, scales: Tensor) -> dict[str, Tensor]:
    tokens, routing, gradient = _case(kind, rank)
    inputs = (tokens.requires_grad_(), routing.probabilities.requires_grad_(), scales.requires_grad_())
    dispatched = dispatcher.dispatch(tokens, routing, num_experts=NUM_EXPERTS)
    outputs = dispatched.rows.tanh() * scales.repeat_interleave(dispatched.counts, dim=0)
    combining = dispatched.combine(outputs)
    before = Event.waited
    combined = combining.wait()
    assert isinstance(dispatcher, LocalDispatcher) or Event.waited == before + 1
    gradients = torch.autograd.grad(combined, inputs, gradient)
    return {"out": combined.detach(), **dict(zip(("tokens", "probabilities", "scales"), gradients, strict=True))}


KINDS = ("random", "no tokens", "one rank", "every rank")


def _run() -> list[dict[str, Tensor]]:
    with MeshConfig(data_parallel_shard=-1, expert_parallel=-1).build() as ctx:
        per_rank = NUM_EXPERTS // ctx.world_size
        dispatcher = DeepEpDispatcher(StandIn(ctx.group_for("expert", "ep_shard")))
        mine = slice(ctx.rank * per_rank, (ctx.rank + 1) * per_rank)
        return [_through(dispatcher, kind, ctx.rank, _scales()[mine].clone()) for kind in KINDS]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_dispatch_and_combine_match_local_dispatch(num_ranks: int) -> None:
    for kind, *found in zip(KINDS, *run_ranks(_run, world_size=num_ranks), strict=True):
        expected_scales = torch.zeros(NUM_EXPERTS, SIZE, dtype=torch.float64)
        for rank, ours in enumerate(found):
            expected = _through(LocalDispatcher(), kind, rank, _scales())
            expected_scales += expected.pop("scales")
            assert_trees_close({name: ours[name] for name in expected}, expected, rtol=1e-12)
        torch.testing.assert_close(torch.cat([ours["scales"] for ours in found]), expected_scales)


def _layer(degree: int) -> dict[str, Tensor]:
    """Return output and gradients of a layer with activation checkpointing, with the tokens split over ranks."""
    with MeshConfig(data_parallel_shard=-1, expert_parallel=degree).build() as ctx:
        with torch.device("meta"):
            router = TopKRouter(SIZE, num_experts=NUM_EXPERTS, top_k=TOP_K, init_std=1.0)
            layer = MoELayer(SIZE, SIZE, router=router, shared=SharedExperts(SIZE, SIZE), init_std=1.0)
            model = nn.Sequential(layer.double())
        parallelize_moe(model, ctx, dispatch=lambda group: DeepEpDispatcher(StandIn(group)))
        materialize(model, device=ctx.device, seed=0)
        draws = torch.Generator().manual_seed(0)
        x = torch.randn(4, 5, SIZE, generator=draws, dtype=torch.float64).chunk(ctx.world_size)[ctx.rank]
        y = checkpoint(model, x.requires_grad_(), use_reentrant=False)
        y.square().sum().backward()
        sync_gradients(model)
        experts = {name: each for name, each in full_gradients(model).items() if ".experts." in name[:11]}
        return {"y": y.detach(), **experts}


def test_layer_on_several_ranks_matches_one_rank() -> None:
    (expected,) = run_ranks(_layer, 1, world_size=1)
    assert len(expected) == 4
    found = run_ranks(_layer, 2, world_size=2)
    for ours in found:
        torch.testing.assert_close({**ours, "y": torch.cat([each["y"] for each in found])}, expected)


# --- buffers and unsupported cases


@dataclass
class Config:
    factor: int

    def get_nvl_buffer_size_hint(self, row_bytes: int, num_ranks: int) -> int:
        return self.factor * row_bytes * min(num_ranks, 8)

    def get_rdma_buffer_size_hint(self, row_bytes: int, num_ranks: int) -> int:
        return self.factor * row_bytes * num_ranks if num_ranks > 8 else 0


class Buffer:
    def __init__(self, group: object, *, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        self.sizes = (num_nvl_bytes, num_rdma_bytes)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        if num_ranks not in (8, 16):
            raise AssertionError(f"Unsupported number of EP ranks: {num_ranks}")
        return Config(3)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config(5)


@dataclass
class Group:
    num_ranks: int

    def size(self) -> int:
        return self.num_ranks


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    package: Any = ModuleType("deep_ep")
    package.Buffer = Buffer
    monkeypatch.setitem(sys.modules, "deep_ep", package)
    monkeypatch.setattr("d9d_moe.deep_ep.find_spec", lambda name: object())


def _buffer(num_ranks: int, device: str = "meta") -> Any:
    group: Any = Group(num_ranks)
    return deep_ep_buffer(group, hidden_size=64, device=torch.device(device))


@pytest.mark.usefixtures("installed")
def test_buffer_sizes_are_the_maximum_of_dispatch_and_combine() -> None:
    assert _buffer(8).sizes == (5 * 128 * 8, 0)
    assert _buffer(16).sizes == (5 * 128 * 8, 5 * 128 * 16)


@pytest.mark.usefixtures("installed")
def test_unsupported_degree_is_refused() -> None:
    with pytest.raises(UserError, match=r"expert_parallel = 6: Unsupported number of EP ranks: 6\. Use another degree"):
        _buffer(6)


def test_cpu_is_refused() -> None:
    with pytest.raises(UserError, match=r"dispatch = 'deep_ep' on a CPU; .* Use dispatch = 'all_to_all'"):
        _buffer(8, "cpu")


def test_missing_package_error_has_install_command() -> None:
    with pytest.raises(UserError, match=r"deep_ep is not installed\. Install it: pip install .*DeepEP"):
        _buffer(8)


def test_other_dtypes_are_refused() -> None:
    tokens = torch.empty(2, SIZE, device="meta")
    routing = Routing(torch.zeros(2, 1, dtype=torch.int64, device="meta"), torch.ones(2, 1, device="meta"))
    group: Any = Group(2)
    with pytest.raises(UserError, match=r"got tokens in torch\.float32; expected torch\.bfloat16"):
        DeepEpDispatcher(StandIn(group)).dispatch(tokens, routing, num_experts=2)
