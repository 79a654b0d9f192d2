import copy
import weakref
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import d9d_peft.quantized_base
from d9d_dist import (
    ColumnParallel,
    MeshConfig,
    Precision,
    RowParallel,
    UserError,
    full_tensor,
    local_tensor,
    parallelize_hsdp,
    parallelize_tensor,
    sync_gradients,
)
from d9d_dist.testing import assert_rounds_like, full_gradients, full_parameters, run_ranks
from d9d_moe import GroupedLinear
from d9d_peft import DoRA, LoRA, adapters_off, fake_quantize, inject, merge_, quantize_base
from d9d_peft.block_format import NF4_VALUES, BlockFormat, dequantize_blocks, quantize_blocks
from d9d_peft.quantized_base import QuantizedWeight
from d9d_state import load_model_state, save_model_state, sequential

FORMATS: tuple[BlockFormat, ...] = ("nf4", "int8")
X = torch.linspace(-1, 1, 64).view(4, 16)


def dense(weight: Tensor, block_format: BlockFormat, block_size: int = 8) -> Tensor:
    """Quantize and dequantize a weight, by a plain loop over its blocks."""
    out = torch.empty_like(weight)
    for row, values in enumerate(weight.flatten(0, -2)):
        for start in range(0, len(values), block_size):
            block = values[start : start + block_size]
            scale = block.abs().max()
            if block_format == "nf4":
                table = torch.tensor(NF4_VALUES)
                codes = ((block / scale)[:, None] - table).abs().argmin(dim=1)
                out.flatten(0, -2)[row, start : start + block_size] = table[codes] * scale
            else:
                out.flatten(0, -2)[row, start : start + block_size] = (block / scale * 127).round() / 127 * scale
    return out


@pytest.mark.parametrize("block_format", FORMATS)
def test_quantized_values_equal_a_plain_loop(block_format: BlockFormat) -> None:
    weight = torch.randn(3, 5, 16)
    codes, scales = quantize_blocks(weight, block_format, 8)
    got = dequantize_blocks(codes, scales, block_format, dtype=torch.float32)
    assert torch.equal(fake_quantize(weight, block_format=block_format, block_size=8), got)
    # Both sides divide and multiply, and round by half an eps each time.
    eps = torch.finfo(torch.float32).eps
    torch.testing.assert_close(got, dense(weight, block_format), rtol=2 * eps, atol=0)
    assert codes.shape == ((3, 5, 8) if block_format == "nf4" else (3, 5, 16))
    again = dequantize_blocks(*quantize_blocks(got, block_format, 8), block_format, dtype=torch.float32)
    torch.testing.assert_close(again, got, rtol=2 * eps, atol=0)


def test_zero_blocks_stay_zero() -> None:
    for block_format in FORMATS:
        codes, scales = quantize_blocks(torch.zeros(2, 16), block_format, 8)
        assert not dequantize_blocks(codes, scales, block_format, dtype=torch.bfloat16).any()


def test_nf4_codes_and_values_equal_torchao() -> None:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import NF4Tensor

    weight = torch.randn(64, 64)
    reference = NF4Tensor.from_tensor(weight, block_size=64, scaler_block_size=64)
    assert reference.nf4.tolist() == pytest.approx(NF4_VALUES, abs=6e-5)  # torchao rounds to four digits
    codes, scales = quantize_blocks(weight, "nf4", 64)
    values = torch.tensor(NF4_VALUES)
    normal = weight / weight.abs().amax(dim=1, keepdim=True)
    to_border = (normal.unsqueeze(-1) - (values[1:] + values[:-1]) / 2).abs().amin(dim=-1)
    ours, theirs = (
        torch.stack((x.flatten() >> 4, x.flatten() & 15), dim=1).view(64, 64) for x in (codes, reference.quantized_data)
    )
    assert torch.equal(ours[to_border > 1e-4], theirs[to_border > 1e-4])
    got = dequantize_blocks(codes, scales, "nf4", dtype=torch.float32)
    # torchao also quantizes the scales, to 8 bits.
    near = (got - reference.get_original_weight()).abs()[to_border > 1e-4]
    assert near.max() < 0.02 * weight.abs().max()


def base() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


def adapted(block_format: BlockFormat | None = "nf4") -> nn.Sequential:
    """Return a model with changed adapters; None for dense weights with quantized values."""
    model = base()
    inject(LoRA("0|2", rank=3, alpha=6), model)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "adapter" in name:
            nn.init.normal_(parameter)
    if block_format is not None:
        quantize_base(model, block_format=block_format, block_size=8)
    return model


def reference(block_format: BlockFormat) -> nn.Sequential:
    model = adapted(None)
    with torch.no_grad():
        for name in ("0.weight", "2.weight"):
            model.get_parameter(name).copy_(dense(model.get_parameter(name), block_format))
    return model


def results(model: nn.Sequential) -> dict[str, Any]:
    x = X.to(model[0].get_parameter("bias").dtype, copy=True).requires_grad_()
    y = model(x)
    y.square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {"y": y.detach(), "x": x.grad, **gradients}


@pytest.mark.parametrize("block_format", FORMATS)
def test_outputs_and_gradients_equal_the_dequantized_weights(block_format: BlockFormat) -> None:
    got, exact = results(adapted(block_format)), results(reference(block_format).double())
    assert len(got) == 6
    assert_rounds_like(got, exact, peer=results(reference(block_format)))


def test_dense_weights_are_not_kept_for_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[weakref.ref[Tensor]] = []

    def spy(*args: Any, **options: Any) -> Tensor:
        weight = dequantize_blocks(*args, **options)
        built.append(weakref.ref(weight))
        return weight

    monkeypatch.setattr(d9d_peft.quantized_base, "dequantize_blocks", spy)
    model = adapted()
    y = model(X.clone().requires_grad_())
    assert [ref() for ref in built] == [None, None]
    y.sum().backward()
    assert [ref() for ref in built] == [None] * 4


def test_checkpointed_layers_have_the_same_gradients() -> None:
    expected, model = results(adapted()), adapted()
    x = X.clone().requires_grad_()
    checkpoint(model, x, use_reentrant=False).square().sum().backward()
    torch.testing.assert_close(x.grad, expected["x"])
    torch.testing.assert_close(model.get_parameter("0.adapter.lora_a").grad, expected["0.adapter.lora_a"])


def test_quantized_experts_compute_as_with_dequantized_weights() -> None:
    grouped = GroupedLinear(3, 16, 8, init_std=0.5)
    inject(LoRA(GroupedLinear, rank=2), grouped)
    original = copy.deepcopy(grouped)
    counts = torch.tensor([3, 0, 4])
    inputs = torch.randn(7, 16)

    def plain(dtype: torch.dtype) -> list[Tensor]:
        layer = copy.deepcopy(original).to(dtype)
        layer.forward = type(layer).forward.__get__(layer)
        layer.weight.data = dense(original.weight.data, "nf4").to(dtype)
        return output_and_gradient(layer, dtype)

    def output_and_gradient(layer: GroupedLinear, dtype: torch.dtype) -> list[Tensor]:
        x = inputs.to(dtype, copy=True).requires_grad_()
        y = layer(x, counts)
        return [y.detach(), *torch.autograd.grad(y.sum(), x)]

    quantize_base(grouped, block_size=8)
    got = output_and_gradient(grouped, torch.float32)  # B is zero
    assert_rounds_like(got, plain(torch.float64), peer=plain(torch.float32))


def test_weights_take_the_bits_of_their_format_and_scales() -> None:
    for block_format, bits in (("nf4", 4.5), ("int8", 8.5)):
        model = nn.Sequential(nn.Linear(256, 512, bias=False))
        inject(LoRA("0", rank=2), model)
        quantize_base(model, block_format=block_format)
        stored = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if "adapter" not in name)
        assert stored * 8 == bits * 256 * 512


def test_casts_of_the_model_do_not_change_the_quantized_weights() -> None:
    model = adapted().bfloat16()
    y = model(X.bfloat16())
    assert y.dtype == torch.bfloat16
    with adapters_off(model):
        expected = F.linear(X.bfloat16(), dense(base()[0].get_parameter("weight"), "nf4").bfloat16())
        y = model[0](X.bfloat16())
        got = y - model[0].get_parameter("bias")
        # The product, the sum with the bias and the difference are rounded to bfloat16.
        rounding = 2 * torch.finfo(torch.bfloat16).eps * y.abs().max().item()
        torch.testing.assert_close(got, expected, rtol=0, atol=rounding)


def _sharded(mesh: dict[str, int], mixed: bool) -> dict[str, Any]:
    with MeshConfig(**mesh).build() as ctx:
        model = adapted()
        bytes_before = _stored(model)
        parallel = ctx.mesh_for("dense")
        parallelize_tensor(model, parallel["tp"], {"0": ColumnParallel(), "2": RowParallel()})
        data = parallel["dp_replicate", "dp_cp_shard", "cp_replicate"]
        precision = Precision(compute=torch.bfloat16, reduce=torch.float32) if mixed else None
        for layer in (model[0], model[2]):
            parallelize_hsdp(layer, data, shard_axis="dp_cp_shard", precision=precision)
        parallelize_hsdp(model, data, shard_axis="dp_cp_shard", precision=precision)
        size = ctx.size("batch", "dp")
        y = model(X.chunk(size)[ctx.coordinate("batch", "dp")])
        y.float().square().sum().backward()
        sync_gradients(model)
        return {"y": full_tensor(y.detach()), "gradients": full_gradients(model), "part": _stored(model) / bytes_before}


def _stored(model: nn.Module) -> int:
    """Return this rank's bytes of quantized weights and scales."""
    tensors = [p for p in model.parameters() if p.dtype == torch.uint8]
    return sum(local_tensor(tensor).numel() for tensor in tensors)


@pytest.mark.parametrize(
    ("mesh", "mixed"),
    [({"data_parallel_shard": 2}, False), ({"data_parallel_shard": 2}, True), ({"tensor_parallel": 2}, False)],
)
def test_sharded_models_give_the_gradients_of_one_process(mesh: dict[str, int], mixed: bool) -> None:
    peer, exact = results(adapted()), results(reference("nf4").double())
    ranks = run_ranks(_sharded, mesh, mixed, world_size=2)
    whole = torch.cat([each["y"] for each in ranks]) if "data_parallel_shard" in mesh else ranks[0]["y"]
    peers_y = adapted().bfloat16()(X.bfloat16()).detach() if mixed else peer["y"]
    assert_rounds_like(whole, exact["y"], peer=peers_y)
    for each in ranks:
        assert each["part"] == 0.5
        if not mixed:
            names = each["gradients"].keys()
            wanted, rounded = ({name: tree[name] for name in names} for tree in (exact, peer))
            assert_rounds_like(each["gradients"], wanted, peer=rounded)


def test_tensor_parallelism_must_split_whole_blocks() -> None:
    model = adapted()
    two_ranks: Any = SimpleNamespace(size=lambda: 2)
    quantized = model[0].get_submodule("quantized")
    assert isinstance(quantized, QuantizedWeight)
    quantized.prepare_tensor(Shard(1), two_ranks)
    three_ranks: Any = SimpleNamespace(size=lambda: 3)
    quantized.prepare_tensor(Shard(0), three_ranks)
    with pytest.raises(UserError, match="splits 2 blocks of 8 input features over 3 ranks; expected whole blocks"):
        quantized.prepare_tensor(Shard(1), three_ranks)


def test_layers_that_cannot_be_quantized_are_refused() -> None:
    def refused(message: str, model: nn.Module, target: Any = nn.Module, **options: Any) -> None:
        options = {"block_size": 8, **options}
        before = {name: id(p) for name, p in model.named_parameters()}
        with pytest.raises(UserError, match=message):
            quantize_base(model, target, **options)
        assert {name: id(p) for name, p in model.named_parameters()} == before

    refused("matches no linear layer or grouped experts with a frozen weight", base())
    refused(r"matches no linear layer .* Call inject\(\) first", adapted(None), "1")
    refused(r"the target '[^']{0,39}, which matches no linear layer", base(), "x" * 99)
    refused("0, which has 16 input features, not a multiple of block_size = 12", adapted(None), "0", block_size=12)
    refused("0, which is already quantized", adapted())
    refused("block_size = 3; expected an even number", adapted(None), block_size=3)
    refused("block_format = 'fp4'; expected 'nf4' or 'int8'", adapted(None), block_format="fp4")
    with_dora = base()
    inject(DoRA("0"), with_dora)
    refused("0, which has DoRA, whose norms need the dense weight", with_dora, "0")
    tied = adapted(None)
    tied.append(nn.Linear(32, 16))
    tied[3].weight = tied[2].weight
    refused("2, which has a tied weight", tied, "2")


def test_a_conv1d_beside_linear_layers_does_not_stay_dense() -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    model = nn.Sequential(nn.Linear(16, 16), conv1d(8, 16)).requires_grad_(False)
    with pytest.raises(UserError, match=r"cannot quantize 1, which is a Conv1D of transformers.* Narrow the target"):
        quantize_base(model, block_size=8)
    quantize_base(model, "0", block_size=8)
    assert model[0].weight.dtype == torch.uint8


def _streamed(mesh: dict[str, int], folder: Path) -> dict[str, Tensor]:
    """Load a dense folder into a model on `meta` that is quantized and sharded; return its whole tensors."""
    with MeshConfig(**mesh).build() as ctx:
        with torch.device("meta"):
            model = base()
        injected = inject(LoRA("0|2", rank=3), model)
        mapper = sequential(injected, quantize_base(model, block_size=8))
        parallel = ctx.mesh_for("dense")
        parallelize_tensor(model, parallel["tp"], {"0": ColumnParallel(), "2": RowParallel()})
        parallelize_hsdp(model, parallel["dp_replicate", "dp_cp_shard", "cp_replicate"], shard_axis="dp_cp_shard")
        model.to_empty(device="cpu")
        load_model_state(model, folder, mapper, progress=False)
        return {name: value for name, value in full_parameters(model).items() if "adapter" not in name}


@pytest.mark.slow("mesh2")
@pytest.mark.parametrize("mesh", [{}, {"data_parallel_shard": 2}, {"tensor_parallel": 2}])
def test_weights_are_quantized_while_they_are_loaded(mesh: dict[str, int], tmp_path: Path) -> None:
    save_model_state(base(), tmp_path)
    expected = {name: value for name, value in adapted().named_parameters() if "adapter" not in name}
    for found in run_ranks(_streamed, mesh, tmp_path, world_size=2 if mesh else 1):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_resetting_a_quantized_layer_is_refused() -> None:
    with pytest.raises(UserError, match=r"0\.weight is quantized, and codes have no initial values to draw"):
        cast("nn.Linear", adapted()[0]).reset_parameters()
    with torch.device("meta"):
        model = base()
        inject(LoRA("0|2"), model)
        quantize_base(model, block_size=8)
    with pytest.raises(UserError, match=r"0\.weight is quantized, and codes have no initial values to draw"):
        cast("nn.Linear", model[0]).reset_parameters()


@pytest.mark.parametrize("block_format", ["nf4", "int8"])
def test_the_inverse_of_the_mapper_yields_the_weights_that_the_model_computes_with(block_format: BlockFormat) -> None:
    model = base()
    inject(LoRA("0|2"), model)
    mapper = quantize_base(model, block_format=block_format, block_size=8)
    for name in ("0", "2"):
        codes, scales = (model.get_parameter(f"{name}.{each}") for each in ("weight", "quantized.scales"))
        dense = mapper.inverse().apply({f"{name}.weight": codes, f"{name}.quantized.scales": scales})
        (weight,) = dense.values()
        assert weight.dtype == torch.float32
        assert torch.equal(weight, model.get_submodule(f"{name}.quantized")(codes, torch.float32))
        again = mapper.apply(dense)
        assert torch.equal(again[f"{name}.weight"], codes)
        assert torch.equal(again[f"{name}.quantized.scales"], scales)


def test_merging_into_quantized_weights_is_refused() -> None:
    with pytest.raises(UserError, match=r"0\.weight is quantized, and merging would round the update"):
        merge_(adapted())


def test_a_copy_of_a_quantized_model_has_its_own_weights() -> None:
    model = nn.Sequential(nn.Linear(64, 4, bias=False))
    inject(LoRA("0", rank=2), model)
    quantize_base(model)
    copied, x = deepcopy(model), torch.randn(3, 64)
    expected = model(x)
    with torch.no_grad():
        model.get_parameter("0.weight").zero_()
    torch.testing.assert_close(copied(x), expected, rtol=0, atol=0)


def test_an_unknown_format_is_an_error() -> None:
    with pytest.raises(UserError, match="block_format = 'int4'; expected one of nf4, int8"):
        fake_quantize(torch.ones(2, 64), block_format=cast(Any, "int4"), block_size=64)
