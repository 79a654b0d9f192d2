from typing import Any

import pytest
import torch

from d9d_dist import UserError
from d9d_modules import quantization_from_hugging_face
from d9d_state import Fp8Blocks, Int4Groups, Mxfp4

DEEPSEEK_V3 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
GPT_OSS = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}
KIMI_K2_THINKING: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


@pytest.mark.parametrize(
    ("entry", "layout"),
    [
        (None, None),
        (DEEPSEEK_V3, Fp8Blocks((128, 128))),
        ({**DEEPSEEK_V3, "scale_fmt": "ue8m0"}, Fp8Blocks((128, 128), power_of_two=True)),
        (GPT_OSS, Mxfp4()),
        (KIMI_K2_THINKING, Int4Groups(32, torch.bfloat16)),
    ],
)
def test_released_layouts_are_read(entry: object, layout: object) -> None:
    assert quantization_from_hugging_face({"quantization_config": entry}) == layout
    assert quantization_from_hugging_face({}) is None


def _int4(**changes: object) -> dict[str, Any]:
    weights = {**KIMI_K2_THINKING["config_groups"]["group_0"]["weights"], **changes}
    return {**KIMI_K2_THINKING, "config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("fp8", r"has quantization_config = 'fp8'; expected an object"),
        ({"quant_method": "gptq"}, r"has quant_method = 'gptq'; expected 'fp8', 'mxfp4' or 'compressed-tensors'"),
        ({**DEEPSEEK_V3, "fmt": "e5m2"}, r"has fmt = 'e5m2'; only 'e4m3' is supported"),
        ({**DEEPSEEK_V3, "weight_block_size": None}, r"has weight_block_size = None; expected two numbers"),
        ({**KIMI_K2_THINKING, "format": "float-quantized"}, r"format = 'float-quantized'; only 'pack-quantized'"),
        ({**KIMI_K2_THINKING, "config_groups": {}}, r"has the config_groups none; only one group is supported"),
        (_int4(num_bits=8), r"num_bits = 8; only 4 is supported"),
        (_int4(symmetric=False), r"symmetric = False; only True is supported"),
        (_int4(group_size=None), r"has no 'group_size'"),
    ],
)
def test_other_layouts_are_refused(entry: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        quantization_from_hugging_face({"quantization_config": entry})
