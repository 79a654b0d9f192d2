"""MoE families for `d9d_modules.from_pretrained_config`, registered as an entry point of this package."""

from dataclasses import replace
from functools import partial
from typing import Any

from d9d_modules import HuggingFaceFamily, parallelize_decoder
from d9d_moe.models.deepseek_v3 import DEEPSEEK_V3, KIMI_K2
from d9d_moe.models.glm4_moe import GLM4_MOE
from d9d_moe.models.glm4_moe_lite import GLM4_MOE_LITE
from d9d_moe.models.gpt_oss import GPT_OSS
from d9d_moe.models.qwen3_moe import QWEN3_MOE
from d9d_moe.models.qwen3_next import QWEN3_5_MOE, QWEN3_NEXT
from d9d_moe.models.sparse_params import sparse_from_hugging_face
from d9d_moe.moe_parallel import parallelize_moe

_parallelize = partial(parallelize_decoder, experts=parallelize_moe)
_LAYOUTS = (sparse_from_hugging_face, partial(sparse_from_hugging_face, layout="fused"))

FAMILIES: tuple[HuggingFaceFamily[Any], ...] = tuple(
    replace(
        family,
        mapper=_LAYOUTS[family is QWEN3_5_MOE],
        other_mappers=() if family is GPT_OSS else (_LAYOUTS[family is not QWEN3_5_MOE],),
        parallelize=_parallelize,
    )
    for family in (DEEPSEEK_V3, GLM4_MOE, GLM4_MOE_LITE, GPT_OSS, KIMI_K2, QWEN3_5_MOE, QWEN3_MOE, QWEN3_NEXT)
)
"""Families of this package, with their mapper and expert parallelism."""
