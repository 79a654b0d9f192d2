"""`quantization_config` in a Hugging Face `config.json`: the layout of block-scaled weights in the checkpoint."""

from collections.abc import Mapping

import torch

from d9d_dist.errors import UserError
from d9d_modules.models.hugging_face_config import HuggingFaceConfig, config_value, require_value
from d9d_state import Fp8Blocks, Int4Groups, Mxfp4
from d9d_state.mapper.quantized import BlockScaled

_WHERE = "quantization_config of config.json"
_ADVICE = "Convert the checkpoint to bfloat16 with the tools of its publisher."


def quantization_from_hugging_face(config: HuggingFaceConfig) -> BlockScaled | None:
    """Return the layout of a checkpoint's block-scaled weights, for `d9d_state.dequantize_inputs`.

    None for a checkpoint that is not quantized.

    Supported are the methods "fp8" with blocks (DeepSeek-V3, Kimi K2), "mxfp4" (GPT-OSS), and "compressed-tensors" in
    the format "pack-quantized" with symmetric 4-bit groups (Kimi K2 Thinking). Activations are never quantized.

    Raises:
        UserError: If the layout is not supported.
    """
    entry = config.get("quantization_config")
    if entry is None:
        return None
    quantization = _object(entry, "quantization_config")
    match quantization.get("quant_method"):
        case "fp8":
            return _fp8(quantization)
        case "mxfp4":
            return Mxfp4()
        case "compressed-tensors":
            return _int4(quantization)
        case method:
            raise UserError(
                f"{_WHERE} has quant_method = {method!r}; expected 'fp8', 'mxfp4' or 'compressed-tensors'. {_ADVICE}"
            )


def _fp8(quantization: HuggingFaceConfig) -> Fp8Blocks:
    require_value(quantization, "fmt", "e4m3", where=_WHERE)
    block = quantization.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise UserError(
            f"{_WHERE} has weight_block_size = {block!r}; expected two numbers, such as [128, 128]: weights with one "
            f"scale for each tensor or row are not read. {_ADVICE}"
        )
    return Fp8Blocks((block[0], block[1]), power_of_two=quantization.get("scale_fmt") == "ue8m0")


def _int4(quantization: HuggingFaceConfig) -> Int4Groups:
    require_value(quantization, "format", "pack-quantized", required=True, where=_WHERE)
    groups = _object(quantization.get("config_groups"), "config_groups")
    if len(groups) != 1:
        raise UserError(f"{_WHERE} has the config_groups {', '.join(groups) or 'none'}; only one group is supported.")
    weights = _object(_object(next(iter(groups.values())), "config_groups").get("weights"), "weights")
    for key, supported in {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True}.items():
        require_value(weights, key, supported, required=True, where=_WHERE)
    require_value(weights, "actorder", None, where=_WHERE)
    return Int4Groups(config_value(weights, "group_size", int), torch.bfloat16)


def _object(value: object, key: str) -> HuggingFaceConfig:
    if not isinstance(value, Mapping):
        raise UserError(f"{_WHERE} has {key} = {value!r}; expected an object.")
    return {str(name): each for name, each in value.items()}
