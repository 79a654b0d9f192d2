"""Load exports with one program, in its own environment, and print the relative error of the logits as JSON.

    python .ci/read_exports.py transformers FOLDER     # or ctranslate2, gguf

Each folder in FOLDER is an export with `expected.safetensors_`: token ids and logits. d9d is not imported. A program
that raises an error prints the error; `check_exports.py` compares.
"""

import json
import re
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

EXPECTED = "expected.safetensors_"  # no name of weights
GGUF_NAMES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
}


def by_transformers(folder: Path, ids: Tensor, config: dict[str, Any], **options: Any) -> Tensor:
    import transformers  # noqa: PLC0415 - in the environment of a reader

    model_class = getattr(transformers, config["architectures"][0])
    model, info = model_class.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, **options
    )
    tied = {"lm_head.weight"} if options else set()  # the reader of GGUF lists the tied head as missing
    missing = {*info["missing_keys"]} - tied
    if missing or info["unexpected_keys"] or info["mismatched_keys"]:
        raise ValueError(str(info))
    return model.eval()(ids).logits


def by_ctranslate2(folder: Path, ids: Tensor, config: dict[str, Any]) -> Tensor:
    import ctranslate2  # noqa: PLC0415
    import ctranslate2.converters  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415

    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    words = {number: word for word, number in vocabulary.items()}
    with tempfile.TemporaryDirectory() as converted:
        ctranslate2.converters.TransformersConverter(str(folder)).convert(converted, force=True)
        generator = ctranslate2.Generator(converted, compute_type="float32", intra_threads=1)
        logits = generator.forward_batch([[words[each] for each in ids[0].tolist()]])
        return torch.from_numpy(np.array(logits))


def by_gguf(folder: Path, ids: Tensor, config: dict[str, Any]) -> Tensor:
    if config["model_type"] not in GGUF_NAMES:
        raise NotImplementedError(f"transformers does not read {config['model_type']} from GGUF")
    write_gguf(folder, config)
    return by_transformers(folder, ids, config, gguf_file="model.gguf")


def write_gguf(folder: Path, config: dict[str, Any]) -> None:
    """Write `model.gguf` with the names, values and permutations of llama.cpp's converter."""
    import gguf  # noqa: PLC0415

    name = GGUF_NAMES[config["model_type"]]
    writer = gguf.GGUFWriter(str(folder / "model.gguf"), name)
    write_values(writer, config)
    architecture = next(each for each, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    experts: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for key, tensor in load_file(folder / "model.safetensors").items():
        found = re.fullmatch(r"(.*\.mlp\.experts)\.(\d+)\.(\w+_proj\.weight)", key)
        if found:
            experts[f"{found[1]}.{found[3]}"][int(found[2])] = tensor
            continue
        array = tensor.float()
        if name == "llama" and (found := re.search(r"\.([qk])_proj\.weight$", key)):
            heads = config["num_attention_heads" if found[1] == "q" else "num_key_value_heads"]
            array = array.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        if name == "gemma3" and key.endswith("norm.weight"):
            array = array + 1
        writer.add_tensor(names.get_name(key, try_suffixes=(".weight", ".bias")), array.contiguous().numpy())
    for key, each in experts.items():
        stacked = torch.stack([each[index] for index in range(len(each))])
        writer.add_tensor(names.get_name(key, try_suffixes=(".weight",)), stacked.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_values(writer: Any, config: dict[str, Any]) -> None:
    import gguf  # noqa: PLC0415

    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_name("Export")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):  # others are a tensor of factors, or not converted
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        writer.add_sliding_window(config["sliding_window"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


READERS = {"transformers": by_transformers, "ctranslate2": by_ctranslate2, "gguf": by_gguf}


def main(reader: str, cases: str) -> None:
    for folder in sorted(Path(cases).iterdir()):
        expected = load_file(folder / EXPECTED)
        config = json.loads((folder / "config.json").read_text())
        try:
            with torch.no_grad():
                logits = READERS[reader](folder, expected["ids"], config)
            gap = (logits - expected["logits"]).abs().max() / expected["logits"].abs().max()
            print(json.dumps([folder.name, gap.item()]), flush=True)
        except Exception as error:  # a user sees it
            print(json.dumps([folder.name, f"{type(error).__name__}: {error}"[:200]]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
