from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from d9d_dist import Region, UserError
from d9d_state import (
    Destination,
    Fp8Blocks,
    Int4Groups,
    ModelFolder,
    Mxfp4,
    StateMapper,
    TensorInfo,
    convert_model_state,
    dequantize,
    dequantize_inputs,
    identity,
    load_model_state,
    parallel,
    read_model_state,
    rename,
    save_model_state,
    stack,
)
from d9d_state.mapper.quantized import BlockScaled

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


class InMemory:
    """Source that counts the elements read of each tensor."""

    def __init__(self, held: dict[str, Tensor]) -> None:
        self.held = held
        self.tensors = {name: TensorInfo.of(tensor) for name, tensor in held.items()}
        self.num_read = dict.fromkeys(held, 0)

    def read_into(self, name: str, region: Region, target: Tensor) -> None:
        target.copy_(region.of(self.held[name]))
        self.num_read[name] += region.num_elements


def _fp8(shape: tuple[int, ...], block: tuple[int, int], *, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return values whose blocks contain the largest float8 value, as the release does, and scales."""
    values = (torch.randn(shape) * 100).clamp(-400, 400)
    values[..., :: block[0], :: block[1]] = 448.0
    grid = (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
    scales = torch.rand(grid) + 0.1 if dtype == torch.float32 else 2.0 ** torch.randint(-9, 4, grid)
    return {"w": values.to(torch.float8_e4m3fn), "w_scale_inv": scales.to(dtype)}


def _mxfp4(shape: tuple[int, ...]) -> dict[str, Tensor]:
    *outer, size = shape
    blocks = torch.randint(0, 256, (*outer, size // 32, 16), dtype=torch.uint8)
    return {"w_blocks": blocks, "w_scales": torch.randint(90, 140, (*outer, size // 32), dtype=torch.uint8)}


def _int4(shape: tuple[int, int], group: int) -> dict[str, Tensor]:
    codes = torch.randint(16, shape)
    codes[:, ::group] = torch.tensor([0, 1, 15])[
        torch.randint(3, (shape[0], shape[1] // group))
    ]  # -8, -7, 7: the scale
    packed = (codes.unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)).sum(dim=-1).to(torch.int32)
    scales = (torch.rand(shape[0], shape[1] // group) + 0.1).bfloat16()
    return {"w_packed": packed, "w_scale": scales, "w_shape": torch.tensor(shape)}


def _fp8_by_loop(held: dict[str, Tensor], block: tuple[int, int]) -> Tensor:
    weight = held["w"].float()
    scales = held["w_scale_inv"].float()
    for row in range(weight.shape[-2]):
        for column in range(weight.shape[-1]):
            weight[..., row, column] *= scales[..., row // block[0], column // block[1]]
    return weight


def _mxfp4_by_loop(held: dict[str, Tensor]) -> Tensor:
    """Follow the bytes one by one; the result is transposed."""
    scales = held["w_scales"].flatten().tolist()
    values = [
        E2M1[code] * 2.0 ** (scale - 127)
        for group, scale in zip(held["w_blocks"].flatten(0, -2).tolist(), scales, strict=True)
        for byte in group
        for code in (byte % 16, byte // 16)
    ]
    *outer, num_groups = held["w_scales"].shape
    return torch.tensor(values).view(*outer, num_groups * 32).mT


def _int4_by_loop(held: dict[str, Tensor], group: int) -> Tensor:
    rows = []
    for words, scales in zip(held["w_packed"].tolist(), held["w_scale"].tolist(), strict=True):
        numbers = [(word % 2**32) // 16**index % 16 - 8 for word in words for index in range(8)]
        rows.append([number * scales[index // group] for index, number in enumerate(numbers)])
    return torch.tensor(rows)


CASES = {
    "fp8": lambda: (Fp8Blocks((4, 3)), held := _fp8((10, 8), (4, 3)), _fp8_by_loop(held, (4, 3))),
    "fp8 of experts": lambda: (Fp8Blocks((2, 4)), held := _fp8((3, 5, 8), (2, 4)), _fp8_by_loop(held, (2, 4))),
    "fp8, e8m0 scales": lambda: (
        Fp8Blocks((4, 4), torch.float8_e8m0fnu, power_of_two=True),
        held := _fp8((8, 8), (4, 4), dtype=torch.float8_e8m0fnu),
        _fp8_by_loop(held, (4, 4)),
    ),
    "mxfp4": lambda: (Mxfp4(), held := _mxfp4((2, 3, 96)), _mxfp4_by_loop(held)),
    "int4": lambda: (Int4Groups(16), held := _int4((5, 48), 16), _int4_by_loop(held, 16)),
}


@pytest.mark.parametrize("case", CASES)
def test_dequantize_matches_a_loop(case: str) -> None:
    layout, held, expected = CASES[case]()
    mapper = dequantize("w", layout)
    assert torch.equal(mapper.apply(held)["w"], expected)
    assert mapper.infer({name: TensorInfo.of(tensor) for name, tensor in held.items()}) == {
        "w": TensorInfo(tuple(expected.shape), torch.float32)
    }


@pytest.mark.parametrize("case", CASES)
def test_regions_match_the_whole_weight_in_each_dtype(case: str) -> None:
    torch.manual_seed(0)
    layout, held, expected = CASES[case]()
    for index in range(30):
        bounds = [sorted(torch.randint(size + 1, (2,)).tolist()) for size in expected.shape]
        region = Region(tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds))
        dtype = (torch.float32, torch.bfloat16, torch.float64)[index % 3]
        memory = torch.full(region.sizes, torch.nan, dtype=dtype)
        dequantize("w", layout).fill({"w": Destination(region, memory)}, InMemory(held))
        assert torch.equal(memory, region.of(expected).to(dtype)), region


def test_a_shard_reads_only_its_values_and_scales() -> None:
    source = InMemory(_fp8((64, 32), (8, 8)))
    dequantize("w", Fp8Blocks((8, 8))).fill({"w": Destination(Region((20, 0), (16, 32)), torch.empty(16, 32))}, source)
    assert source.num_read == {"w": 16 * 32, "w_scale_inv": 3 * 4}
    source = InMemory(_mxfp4((4, 6, 64)))  # the weight is [4, 64, 6]
    dequantize("w", Mxfp4()).fill({"w": Destination(Region((1, 32, 2), (1, 32, 3)), torch.empty(1, 32, 3))}, source)
    assert source.num_read == {"w_blocks": 3 * 16, "w_scales": 3}
    source = InMemory(_int4((6, 64), 32))
    dequantize("w", Int4Groups(32)).fill({"w": Destination(Region((1, 0), (2, 64)), torch.empty(2, 64))}, source)
    assert source.num_read == {"w_packed": 2 * 8, "w_scale": 2 * 2, "w_shape": 2}


@pytest.mark.parametrize("case", CASES)
def test_quantize_restores_decoded_weights(case: str) -> None:
    layout, held, expected = CASES[case]()
    mapper = dequantize("w", layout)
    stored = mapper.inverse().apply({"w": expected})
    assert stored.keys() == held.keys()
    for name, tensor in stored.items():
        assert tensor.shape == held[name].shape
        assert tensor.dtype == held[name].dtype
    infos = mapper.inverse().infer({"w": TensorInfo.of(expected)})
    assert infos == {name: TensorInfo.of(tensor) for name, tensor in stored.items()}
    values, scale = list(held)[:2]
    if case.startswith("mxfp4"):  # another exponent, the same weights, including the signs of zeros
        again = mapper.apply(stored)["w"]
        assert torch.equal(again, expected)
        assert torch.equal(again.signbit(), expected.signbit())
    elif "e8m0" in case:
        assert all(torch.equal(stored[name].float(), held[name].float()) for name in held)
    else:
        assert torch.equal(stored[values].float(), held[values].float())
        torch.testing.assert_close(stored[scale], held[scale], rtol=2 * torch.finfo(held[scale].dtype).eps, atol=0)


@pytest.mark.parametrize(
    ("layout", "bound"), [(Fp8Blocks((32, 32)), 2**-4), (Mxfp4(), 2**-2), (Int4Groups(32), 2**-3)], ids=str
)
def test_quantize_rounds_to_nearest(layout: BlockScaled, bound: float) -> None:
    """Bounds are relative to the largest magnitude of a block: half of the largest gap between two numbers."""
    weight = torch.randn(64, 96)
    mapper = dequantize("w", layout)
    again = mapper.apply(mapper.inverse().apply({"w": weight}))["w"]
    assert (again - weight).abs().max() <= bound * weight.abs().max()
    exact = {"w": torch.zeros(64, 96)}
    assert torch.equal(mapper.apply(mapper.inverse().apply(exact))["w"], exact["w"])


def test_mxfp4_rounds_midpoints_to_even_and_saturates() -> None:
    numbers = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.9, -0.25, -0.75, -5.0] + [4.0] * 21)
    mapper = dequantize("w", Mxfp4())
    again = mapper.apply(mapper.inverse().apply({"w": numbers[:, None]}))["w"].flatten()
    assert again[:11].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -0.0, -1.0, -4.0]


def test_decoded_weights_equal_transformers() -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    held = _fp8((256, 384), (128, 128))
    reference = fp8.Fp8Dequantize(None)._dequantize_one(held["w"], held["w_scale_inv"], torch.bfloat16)
    assert torch.equal(dequantize("w", Fp8Blocks(), dtype=torch.bfloat16).apply(held)["w"], reference)
    held = _mxfp4((2, 3, 96))
    reference = mxfp4.convert_moe_packed_tensors(held["w_blocks"], held["w_scales"])
    assert torch.equal(dequantize("w", Mxfp4(), dtype=torch.bfloat16).apply(held)["w"], reference)


class Experts(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.zeros(2, 8, 8, dtype=dtype))
        self.norm = nn.Parameter(torch.zeros(8, dtype=dtype))


NAMES = ["0.weight", "1.weight"]


def _mapper() -> StateMapper:
    return parallel(stack(NAMES, "experts"), identity("norm"))


def _folder(path: Path) -> dict[str, Tensor]:
    held = [_fp8((8, 8), (4, 4)) for _ in NAMES]
    state = {name: tensors["w"] for name, tensors in zip(NAMES, held, strict=True)}
    state |= {f"{name}_scale_inv": tensors["w_scale_inv"] for name, tensors in zip(NAMES, held, strict=True)}
    state["norm"] = torch.randn(8).bfloat16()
    module = nn.Module()
    for name, tensor in state.items():
        module.register_buffer(name.replace(".", "_"), tensor)
    renames = _renames(state)
    save_model_state(module, path, renames)
    return state


def _renames(state: dict[str, Tensor]) -> StateMapper:
    return parallel(*(rename(name.replace(".", "_"), name) for name in state))


def test_a_folder_in_the_released_layout_loads_exports_and_converts(tmp_path: Path) -> None:
    state = _folder(tmp_path / "released")
    mapper = dequantize_inputs(_mapper(), Fp8Blocks((4, 4)), ModelFolder.open(tmp_path / "released").tensors)
    model = Experts(torch.float32)
    load_model_state(model, tmp_path / "released", mapper)
    expected = torch.stack(
        [_fp8_by_loop({"w": state[n], "w_scale_inv": state[f"{n}_scale_inv"]}, (4, 4)) for n in NAMES]
    )
    assert torch.equal(model.experts, expected)
    assert torch.equal(model.norm, state["norm"].float())

    save_model_state(model, tmp_path / "again", mapper.inverse())
    again = dict(read_model_state(tmp_path / "again"))
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name].float(), state[name].float()) for name in NAMES)

    narrow = Experts(torch.bfloat16)  # the plain mapper exports in the dtype of the model
    load_model_state(narrow, tmp_path / "released", mapper)
    save_model_state(narrow, tmp_path / "plain", _mapper().inverse())
    plain = dict(read_model_state(tmp_path / "plain"))
    assert torch.equal(torch.stack([plain[name] for name in NAMES]), expected.bfloat16())

    tensors = ModelFolder.open(tmp_path / "released").tensors
    convert = dequantize_inputs(identity(*NAMES, "norm"), Fp8Blocks((4, 4)), tensors, dtype=torch.bfloat16)
    convert_model_state(tmp_path / "released", tmp_path / "converted", convert)
    converted = dict(read_model_state(tmp_path / "converted"))
    assert converted.keys() == plain.keys()
    assert all(torch.equal(converted[name], plain[name]) for name in NAMES)


def test_float8_values_without_their_scales_are_refused(tmp_path: Path) -> None:
    _folder(tmp_path / "released")
    with pytest.raises(UserError, match=r"experts: got \[2, 8, 8\] float8_e4m3fn .*; expected \[2, 8, 8\] bfloat16"):
        load_model_state(Experts(torch.bfloat16), tmp_path / "released", _mapper(), unused="ignore")


@pytest.mark.parametrize(
    ("layout", "infos", "message"),
    [
        (
            Fp8Blocks((4, 4)),
            {"w": ((8, 8), torch.float8_e4m3fn), "w_scale_inv": ((2, 3), torch.float32)},
            r"\[2, 3\] float32; expected .* scales of shape \[2, 2\], one per block of 4 x 4",
        ),
        (
            Fp8Blocks((4, 4)),
            {"w": ((8, 8), torch.bfloat16), "w_scale_inv": ((2, 2), torch.float32)},
            r"got \[8, 8\] bfloat16 .*; expected float8_e4m3fn",
        ),
        (
            Mxfp4(),
            {"w_blocks": ((4, 2, 8), torch.uint8), "w_scales": ((4, 2), torch.uint8)},
            r"\[4, 2, 8\] uint8 .*; expected uint8 blocks of 16 bytes",
        ),
        (
            Int4Groups(32),
            {"w_packed": ((4, 8), torch.int32), "w_scale": ((4, 4), torch.bfloat16), "w_shape": ((2,), torch.int64)},
            r"expected packed int32 weights, floating-point scales of shape \[4, 2\] \(one per 32 numbers\)",
        ),
    ],
)
def test_tensors_that_do_not_match_are_refused(
    layout: BlockScaled, infos: dict[str, tuple[tuple[int, ...], torch.dtype]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        dequantize("w", layout).infer({name: TensorInfo(*info) for name, info in infos.items()})


def test_quantize_needs_whole_groups() -> None:
    with pytest.raises(ValueError, match=r"got shape \[4, 40\]; expected a last dim that is a multiple of 32"):
        dequantize("w", Int4Groups(32)).inverse().infer({"w": TensorInfo((4, 40), torch.float32)})
