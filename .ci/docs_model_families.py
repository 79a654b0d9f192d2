"""Generate the table of model families from their code and the rows of the oracle while the documentation is built."""

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "integration_tests"), str(ROOT / "examples")]

from oracle import GRIDS, cells, parse_cell  # noqa: E402
from oracle_grid import DEGREES  # noqa: E402

from d9d_modules import GroupedQueryParams, known_families  # noqa: E402

ORACLE_NAMES = {
    "llama": "llama3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "mistral": "mistral",
    "glm4": "glm4",
    "gemma3_text": "gemma3",
}
"""Models of the oracle's grid by the `model_type` of their family. Sparse families have rows of their own."""

INTRODUCTION = """# Model families

Generated from the families that `d9d_modules.from_pretrained_config` recognizes, and from the rows of
[the oracle](oracle.md), which compare losses, every gradient and every parameter with one process in float64. Axes:
`pp` pipeline, `dp` data (replicated and sharded), `cp` context, `tp` tensor, `ep` expert.

All families have pipeline stages, packed documents, LoRA, the heads of [dense decoders](dense_decoders.md) (language
model, classification, embedding, several heads), and weights and `config.json` in both directions. Quantized weights
are read in the layouts FP8 blocks, MXFP4 and INT4 groups, see [Model weights](model_io.md).
"""


def attention(model: str) -> str:
    """Describe the attention of a model of the oracle."""
    params: Any = parse_cell(model).experiment.model
    params = params.params
    assert isinstance(params, GroupedQueryParams)
    form = params.attention_form
    features = {
        "QKV bias": form.qkv_bias,
        "output bias": form.output_bias,
        "QK norm": form.qk_norm,
        "partial RoPE": form.rotary_dim is not None,
        "interleaved RoPE": form.rotary_layout == "interleaved",
        "own softmax scale": form.scale is not None,
        "zero-centered norms": params.zero_centered_norms,
        "sandwich norms": params.sandwich_norms,
    }
    return ", ".join(name for name, has in features.items() if has) or "plain"


def layouts(model: str) -> str:
    """Return the axes of the rows of a model."""
    chosen = [dict(cell.values) for grid in GRIDS for cell in cells(grid) if dict(cell.values)["model"] == model]
    return ", ".join(f"`{axis}`" for axis in DEGREES if any(values[axis] != "1" for values in chosen))


def page() -> str:
    """Return the page."""
    lines = [INTRODUCTION, "| Family | Hyperparameters | Attention | Layouts proven |", "| --- | --- | --- | --- |"]
    for name, family in sorted(known_families().items()):
        model = ORACLE_NAMES.get(name)
        cells_ = (
            ("see [sparse decoders](sparse_decoders.md)", "see there")
            if model is None
            else (
                attention(model),
                layouts(model),
            )
        )
        lines.append(f"| `{name}` | `{family.params.__name__}` | {cells_[0]} | {cells_[1]} |")
    lines += [
        "",
        "A bidirectional Qwen3 (an encoder or embedder) has rows of its own: " + layouts("encoder") + ".",
        "",
        "## What is not there",
        "",
        "- Images: of multimodal checkpoints only the language model, where a family names it.",
        "- Attention dropout, and activations other than those of released models.",
        "- Context parallelism by `ring` with windows, another softmax scale, sinks or bidirectional attention.",
        "- Context parallelism of pooled heads.",
    ]
    lines += ["", "Tensors of released checkpoints that are named and not loaded:", ""]
    for name, family in sorted(known_families().items()):
        patterns = ", ".join(f"`{pattern}`" for pattern in family.unused)
        lines.append(f"- `{name}`: {patterns}")
    return "\n".join(lines) + "\n"


def on_files(files: Files, config: Any) -> Files:
    """Add the page; mkdocs calls this hook before it reads pages."""
    files.append(File.generated(config, "model_families.md", content=page()))
    return files
