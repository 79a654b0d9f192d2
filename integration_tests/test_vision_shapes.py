"""Vision-language models of three shapes, in `examples/`: each layout equals one process, and images are read."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from cross_attention import CrossAttention, CrossLayer
from image_text import HEAD_DIM, NUM_HEADS, SIZE, Caption, Tower, VisionLanguageModel, captions, train
from jobs import EXAMPLES
from joint_attention import JointLayer
from mixture_of_transformers import MixtureLayer
from torch import nn

from d9d_dist import StageInfo
from d9d_loop.testing import assert_same_as_one_process

SHAPES: dict[str, Any] = {"joint": JointLayer, "cross": CrossLayer, "mixture": MixtureLayer}
LAYOUTS = (
    "dp_replicate=2",
    "dp_shard=2,microbatch=2",
    "tp=2",
    "pp=2,microbatch=2",
    "pp=2,tp=2,microbatch=2",
    "pp=2,dp_shard=2,microbatch=1",
    "dp_shard=2,tp=2",
)


@pytest.mark.slow("cross-pp=2,tp=2,microbatch=2", "mixture-pp=2,dp_shard=2,microbatch=1")
@pytest.mark.sample(
    "joint-tp=2", "cross-pp=2,microbatch=2", "cross-pp=2,tp=2,microbatch=2", "mixture-pp=2,dp_shard=2,microbatch=1"
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_layout_equals_one_process(shape: str, layout: str) -> None:
    model = VisionLanguageModel(SHAPES[shape])
    assert_same_as_one_process(model, captions(8), task=Caption(), layouts=[layout])


def _losses(model: nn.Module, sample: dict[str, Any]) -> torch.Tensor:
    inputs = Caption().inputs({name: each[None] for name, each in sample.items()})
    return model(*inputs.first, **inputs.shared)[0]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_text_reads_its_image_and_no_later_token(shape: str) -> None:
    torch.manual_seed(0)
    model = VisionLanguageModel(SHAPES[shape]).build(StageInfo(0, 1))
    with_image, *_, without = captions(4)
    for sample in (with_image, without):
        losses = _losses(model, sample)
        other = _losses(model, {**sample, "patches": torch.randn_like(sample["patches"])})
        assert torch.equal(losses, other) == (sample is without)
        ids = sample["ids"].clone()
        ids[-1] = (ids[-1] + 1) % 5
        changed = _losses(model, {**sample, "ids": ids})
        assert torch.equal(losses[:-1], changed[:-1])
        assert losses[-1] != changed[-1]


def test_patches_see_each_other() -> None:
    torch.manual_seed(0)
    tower, patches = Tower(), captions(1)[0]["patches"][None]
    changed = patches.clone()
    changed[0, -1] += 1
    assert not tower(patches)[0, 0].equal(tower(changed)[0, 0])


def test_cross_attention_equals_that_of_torch() -> None:
    torch.manual_seed(0)
    cross = CrossAttention().double()
    plain = nn.MultiheadAttention(SIZE, NUM_HEADS, bias=False, batch_first=True, dtype=torch.float64)
    assert SIZE == NUM_HEADS * HEAD_DIM
    with torch.no_grad():
        plain.in_proj_weight.copy_(torch.cat([each.weight for each in (cross.q_proj, cross.k_proj, cross.v_proj)]))
        plain.out_proj.weight.copy_(cross.o_proj.weight)
    text, image = torch.randn(2, 5, SIZE).double(), torch.randn(2, 9, SIZE).double()
    normed = nn.functional.rms_norm(text, (SIZE,), cross.norm.weight, eps=cross.norm.eps)
    expected = plain(normed, image, image, need_weights=False)[0] * torch.tanh(torch.tensor(0.5)).double()
    torch.testing.assert_close(cross(text, image), expected, rtol=1e-6, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["joint_attention", "cross_attention", "mixture_of_transformers"])
def test_the_examples_learn_to_read_images(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = dict(zip(("joint_attention", "cross_attention", "mixture_of_transformers"), SHAPES.values(), strict=True))
    monkeypatch.setattr("sys.argv", ["example", "--run.folder", str(tmp_path), "--logging.progress", "false"])
    train(layers[name], EXAMPLES / f"{name}.toml")
    loss = ast.literal_eval(capsys.readouterr().out.splitlines()[-1])["loss"]
    assert loss < 0.5  # without the images, at least 0.75 (ln 9 + ln 8) / 4 = 0.80
