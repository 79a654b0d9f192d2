import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils.checkpoint import checkpoint

from d9d_dist import MeshConfig, UserError, synchronize_batch_norm
from d9d_dist.testing import assert_rounds_like, run_ranks

SPLITS = (slice(0, 5), slice(5, 8))
"""Which of eight samples each of two ranks has."""


class WithActivation(nn.BatchNorm2d):
    """Batch norm whose own forward calls `F.batch_norm` on the input, as timm's `BatchNormAct2d`."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        factor = 0.0 if self.momentum is None else self.momentum
        training = self.training
        return F.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, training, factor, self.eps
        ).relu()


class OfHalves(nn.BatchNorm2d):
    """Batch norm of two halves of the batch, as timm's `SplitBatchNorm2d`."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return torch.cat([super(OfHalves, self).forward(half) for half in input.chunk(2)])


class OfItsOwn(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return input - input.mean((0, 2, 3), keepdim=True)


def _frozen() -> nn.Module:
    layer = nn.BatchNorm2d(3).eval()
    layer.running_mean = torch.tensor([1.0, 2.0, 3.0])
    return layer


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(3), (8, 3)),
    "1d of sequences, cumulative": (lambda: nn.BatchNorm1d(3, momentum=None), (8, 3, 5)),
    "2d without parameters": (lambda: nn.BatchNorm2d(3, affine=False), (8, 3, 4, 4)),
    "2d channels last": (lambda: nn.BatchNorm2d(3), (8, 3, 4, 4)),
    "3d without running statistics": (lambda: nn.BatchNorm3d(3, track_running_stats=False), (8, 3, 2, 2, 2)),
    "frozen": (_frozen, (8, 3, 4, 4)),
    "eval without running statistics": (lambda: nn.BatchNorm2d(3, track_running_stats=False).eval(), (8, 3, 4, 4)),
    "torch's synchronized one": (lambda: nn.SyncBatchNorm(3), (8, 3, 4, 4)),
    "lazy, run once": (lambda: _run_once(nn.LazyBatchNorm2d()), (8, 3, 4, 4)),
    "with an activation": (lambda: WithActivation(3), (8, 3, 4, 4)),
    "instance norm": (lambda: nn.InstanceNorm2d(3, track_running_stats=True, affine=True), (8, 3, 4, 4)),
}


def _run_once(layer: nn.Module) -> nn.Module:
    layer(torch.randn(2, 3, 4, 4))
    return layer


def _layer(name: str) -> tuple[nn.Module, Tensor]:
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    layer, x = make().double(), torch.randn(shape, dtype=torch.float64) + 3
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    if "last" in name:
        x = x.to(memory_format=torch.channels_last)
    return layer, x


def _trace(layer: nn.Module, x: Tensor, part: slice) -> dict[str, Tensor]:
    """Return loss, gradients, second derivatives and buffers after two steps with a part of the batch."""
    x = x.clone().requires_grad_()
    factors = torch.cos(torch.arange(x.numel(), dtype=x.dtype)).view(x.shape)
    for _ in range(2):
        loss = (layer(x[part]) ** 3 * factors[part]).sum()
    names = ["x", *(name for name, _ in layer.named_parameters())]
    gradients = torch.autograd.grad(loss, [x, *layer.parameters()], create_graph=True)
    again = torch.autograd.grad((gradients[0][part] ** 2 * factors[part]).sum(), x)[0]
    sums = {"loss": loss, "gradient of gradients": again, **dict(zip(names, gradients, strict=True))}
    return {key: value.detach() for key, value in sums.items()} | {
        f"buffer {name}": buffer.clone() for name, buffer in layer.named_buffers()
    }


def _traces() -> dict[str, dict[str, Tensor]]:
    traces = {}
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        for name in LAYERS:
            layer, x = _layer(name)
            synchronize_batch_norm(layer, ctx.group_for("batch", "dp", "cp"))
            traces[name] = _trace(copy.deepcopy(layer), x, SPLITS[ctx.rank])
    return traces


def test_two_ranks_equal_one_process_with_both_batches() -> None:
    first, second = run_ranks(_traces, world_size=2)
    for name in LAYERS:
        layer, x = _layer(name)
        if isinstance(layer, nn.SyncBatchNorm):
            layer.__class__ = nn.BatchNorm2d  # nn.SyncBatchNorm has no CPU kernel for a single process
        for key, expected in _trace(layer, x, slice(None)).items():
            ours = first[name][key]
            if key.startswith("buffer"):
                assert torch.equal(ours, second[name][key]), (name, key)
            else:
                ours = ours + second[name][key]
            torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-11, msg=lambda m, at=(name, key): f"{at}{m}")


def test_unsynchronized_ranks_differ() -> None:
    """The comparison above is meaningful only if statistics of a single rank give another loss."""
    layer, x = _layer("2d without parameters")
    expected = _trace(copy.deepcopy(layer), x, slice(None))["loss"]
    apart = sum(_trace(copy.deepcopy(layer), x, part)["loss"] for part in SPLITS)
    assert abs(apart / expected - 1) > 1e-3


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Sequential(nn.BatchNorm2d(4)))


def _kept() -> None:
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        model = _model()
        calls: list[str] = []
        model[1].register_forward_hook(lambda *_: calls.append("hook"))
        names = list(model.state_dict())
        assert synchronize_batch_norm(model, ctx.group_for("batch", "dp", "cp")) == ["1", "3.0"]
        assert isinstance(model[1], nn.BatchNorm2d)
        assert repr(model) == repr(_model())
        assert list(model.state_dict()) == names
        x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(ctx.rank))
        model(x)
        assert calls == ["hook"]
        # Evaluation issues no collectives.
        model.eval()
        if ctx.rank == 0:
            with torch.no_grad():
                expected = _model().eval()
                expected.load_state_dict(model.state_dict())
                assert torch.equal(model(x), expected(x))
                conv, norm = model[0], model[1]
                assert isinstance(conv, nn.Conv2d)
                peer, fused = norm(conv(x)), fuse_conv_bn_eval(conv, norm)(x)
                exact = norm.double()(conv.double()(x.double()))
                assert_rounds_like(fused, exact, peer=peer)


def test_names_hooks_and_evaluation_are_unchanged() -> None:
    run_ranks(_kept, world_size=2)


def _checkpointed(use_reentrant: bool) -> tuple[Tensor, list[Tensor]]:
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        layer, x = _layer("2d channels last")
        synchronize_batch_norm(layer, ctx.group_for("batch", "dp", "cp"))
        return _recomputed(layer, x, SPLITS[ctx.rank], use_reentrant)


def _recomputed(layer: nn.Module, x: Tensor, part: slice, use_reentrant: bool) -> tuple[Tensor, list[Tensor]]:
    x = x.requires_grad_()
    output = checkpoint(layer, x[part], use_reentrant=use_reentrant)
    assert isinstance(output, Tensor)
    (output**3).sum().backward()
    assert x.grad is not None
    return x.grad, [buffer.clone() for buffer in layer.buffers()]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_gives_the_gradients_and_statistics_of_one_process(use_reentrant: bool) -> None:
    (first, buffers), (second, _) = run_ranks(_checkpointed, use_reentrant, world_size=2)
    expected, expected_buffers = _recomputed(*_layer("2d channels last"), slice(None), use_reentrant)
    torch.testing.assert_close(first + second, expected)
    torch.testing.assert_close(buffers, expected_buffers)


def _refused() -> list[str]:
    messages = []
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        for layer in (OfHalves(3), OfItsOwn(3)):
            synchronize_batch_norm(layer, ctx.group_for("batch", "dp", "cp"))
            with pytest.raises(UserError) as error:
                layer(torch.randn(4, 3, 2, 2))
            messages.append(str(error.value))
            layer.eval()(torch.randn(4, 3, 2, 2))
    return messages


def test_layers_that_compute_statistics_in_another_way_are_refused() -> None:
    for messages in run_ranks(_refused, world_size=2):
        for name, message in zip(("OfHalves", "OfItsOwn"), messages, strict=True):
            assert message.startswith(f"{name} does not compute the statistics of its input with one call of F.batch")


def _evaluated() -> str:
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        layer = nn.BatchNorm2d(3, track_running_stats=False).eval()
        synchronize_batch_norm(layer, ctx.group_for("batch", "dp", "cp"))
        with torch.no_grad(), pytest.raises(UserError) as error:
            layer(torch.randn(4, 3, 2, 2))
    return str(error.value)


def test_evaluations_without_running_statistics_are_refused() -> None:
    for message in run_ranks(_evaluated, world_size=2):
        assert message.startswith("BatchNorm2d has no running statistics, so in an evaluation each rank would")


def _half() -> tuple[torch.dtype, torch.dtype, bool]:
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        layer = nn.BatchNorm2d(3)
        synchronize_batch_norm(layer, ctx.group_for("batch", "dp", "cp"))
        # One value per channel on this rank, and a mean so large that bfloat16 squares would cancel.
        x = torch.full((1, 3, 1, 1), 1000.0 + 8 * ctx.rank, dtype=torch.bfloat16, requires_grad=True)
        y = layer(x)
        y.sum().backward()
        assert x.grad is not None
        assert layer.weight.grad is not None
        is_right = bool((y == (-1) ** (1 + ctx.rank)).all()) and layer.running_mean is not None
        return x.grad.dtype, layer.weight.grad.dtype, is_right


def test_activations_in_bfloat16_keep_their_dtype() -> None:
    assert run_ranks(_half, world_size=2) == [(torch.bfloat16, torch.float32, True)] * 2


def test_one_rank_needs_no_synchronization() -> None:
    layer, x = _layer("2d channels last")
    expected = _trace(copy.deepcopy(layer), x, slice(None))
    with MeshConfig().build() as ctx:
        synchronize_batch_norm(layer, ctx.group_for("batch", "dp", "cp"))
        torch.testing.assert_close(_trace(layer, x, slice(None)), expected)
