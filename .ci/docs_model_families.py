"""Generate the table of model families from their code and the rows of the oracle while the documentation is built."""

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "integration_tests"), str(ROOT / "examples")]

import test_sparse_family_rows  # noqa: E402
from family_rows import DENSE, SPARSE  # noqa: E402
from oracle import GRIDS, cells, parse_cell  # noqa: E402
from oracle_grid import DEGREES  # noqa: E402

from d9d_modules import GroupedQueryParams, HuggingFaceFamily  # noqa: E402
from d9d_modules.models.pretrained import known_families  # noqa: E402

QUANTIZED = {
    "deepseek_v3": "FP8 blocks",
    "gpt_oss": "MXFP4",
    "kimi_k2": "FP8 blocks, INT4 groups",
    "qwen3_next": "FP8 blocks",
}
"""Layouts of the released quantized weights that tests read, by `model_type`."""

INTRODUCTION = """# Model families

Generated from the families that `d9d_modules.from_pretrained_config` recognizes, and from the rows of
[the oracle](testing.md#the-oracle), which compare losses, every gradient and every parameter with one process in
float64. Axes: `pp` pipeline, `dp` data (replicated and sharded), `cp` context, `tp` tensor, `ep` expert.

All families have pipeline stages, packed documents, LoRA, and weights and `config.json` in both directions. Heads are
those of [dense decoders](decoders.md): language model (for encoders the masked one), classification, embedding,
several heads. FP8 blocks and INT4 groups are read for all families, MXFP4 for experts, see
[Model weights](model_io.md); the table names the layouts of released checkpoints. "MTP" families have checkpoints with
layers for multi-token prediction, which `DecoderWithMtp` trains, loads and exports.
"""


def attention(params: Any, family: HuggingFaceFamily[Any]) -> str:
    """Describe the attention of a family by its model in the oracle."""
    kinds = {params.mixer_kind(index) for index in range(params.num_layers)}
    features = {
        "Gated DeltaNet": "linear_attention" in kinds,
        "latent": not isinstance(params, GroupedQueryParams),
        "sliding windows": {"sliding_window", "local_attention"} & {*family.used},
        "zero-centered norms": params.zero_centered_norms,
        "sandwich norms": params.sandwich_norms,
    }
    if isinstance(params, GroupedQueryParams):
        form = params.attention_form
        features |= {
            "bidirectional": not form.is_causal,
            "QKV bias": form.qkv_bias,
            "output bias": form.output_bias,
            "QK norm": form.qk_norm,
            "output gate": form.output_gate,
            "sinks": form.sinks,
            "partial RoPE": form.rotary_dim is not None,
            "interleaved RoPE": form.rotary_layout == "interleaved",
            "own softmax scale": form.scale is not None,
        }
    return ", ".join(name for name, has in features.items() if has) or "plain"


def layouts(model: str) -> str:
    """Return the axes of the rows of a model in the oracle's grids."""
    chosen = [dict(cell.values) for grid in GRIDS for cell in cells(grid) if dict(cell.values)["model"] == model]
    return _axes([axis for values in chosen for axis in DEGREES if values[axis] != "1"])


def sparse_layouts(family: str) -> str:
    """Return the axes of the rows of a family in `test_sparse_family_rows.py`."""
    rows = [row.layout for row in test_sparse_family_rows.ROWS if row.family == family]
    return _axes([part.partition("=")[0] for row in rows for part in row.split(",")])


def _axes(found: list[str]) -> str:
    return ", ".join(f"`{axis}`" for axis in (*DEGREES, "ep") if axis in found)


def row(name: str, family: HuggingFaceFamily[Any]) -> str:
    """Return the row of a family in the table."""
    if (model := DENSE.get(family.params)) is not None:
        provider: Any = parse_cell(model).experiment.model
        params, proven = getattr(provider, "moe", None) or provider.params, layouts(model)
    else:
        model = SPARSE[family.params]
        params, proven = test_sparse_family_rows.family_params(model, 4), sparse_layouts(model)
    has_mtp = any("mtp" in pattern or "{num_layers}" in pattern for pattern in family.unused)
    head = "masked language model" if family.architecture.endswith("MaskedLM") else "language model"
    heads = f"{head}, classification, embedding, several{', MTP' if has_mtp else ''}"
    columns = (f"`{name}`", f"`{family.params.__name__}`", attention(params, family), heads, QUANTIZED.get(name, ""))
    return f"| {' | '.join((*columns, proven))} |"


def page() -> str:
    """Return the page."""
    lines = [
        INTRODUCTION,
        "| Family | Hyperparameters | Attention | Heads | Released quantized | Layouts proven |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    families = {family.model_type: family for family in known_families().values()}
    lines += [row(name, family) for name, family in sorted(families.items())]
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
        "- Heads of encoders for tokens, questions and multiple choice.",
        "- Dense layers that sentence-transformers has after the pooling (EmbeddingGemma): folders are an error unless",
        "  `pooling=` asks for an embedding head of its own.",
    ]
    lines += ["", "Tensors of released checkpoints that are named and not loaded: rotary buffers, and", ""]
    for name, family in sorted(families.items()):
        patterns = ", ".join(f"`{pattern}`" for pattern in family.unused)
        lines += [f"- `{name}`: {patterns}"] if patterns else []
    return "\n".join(lines) + "\n"


def on_files(files: Files, config: Any) -> Files:
    """Add the page; mkdocs calls this hook before it reads pages."""
    files.append(File.generated(config, "model_families.md", content=page()))
    return files
