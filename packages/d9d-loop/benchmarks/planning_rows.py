"""Published measurements as inputs of the planner: model, layout and cluster of each row, and its step time.

What a source does not state is set by a rule for the whole source, given in its function; no rule depends on the
measured value. Models are sizes of plain GPTs or decoders: the planner needs no model catalogue.
"""

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from d9d_loop.planning import DecoderShape, PlanLayout

Row = dict[str, str]


@dataclass(frozen=True)
class Measured:
    """One measured step.

    Attributes:
        group: Rows of one source and cluster, whose constants are fitted together.
        cluster: Name of the hardware description.
        tuned: Layouts among which the authors chose the fastest, if the source does not state them.
        seconds: Measured step time; `None` without one.
        memory: Measured peak memory in bytes; `None` without one.
    """

    group: str
    cluster: str
    shape: DecoderShape
    tuned: tuple[PlanLayout, ...]
    seconds: float | None
    memory: float | None
    row: Row


def read(path: Path) -> Iterator[Measured]:
    """Yield the rows of a file that the planner can describe."""
    with path.open() as file:
        for row in csv.DictReader(file):
            for part, read_row in _SOURCES.items():
                if part in row["source"]:
                    found = read_row(row)
                    if found is not None:
                        yield found
                    break


def _number(row: Row, name: str, default: int = 1) -> int:
    text = row[name]
    return int(float(text)) if text not in ("", "n/a", "-") else default


def _gpt(row: Row, vocab_size: int = 51200) -> DecoderShape:
    hidden = _number(row, "hidden")
    return DecoderShape.gpt(
        hidden_size=hidden,
        num_layers=_number(row, "layers"),
        num_heads=_number(row, "heads", hidden // 128),
        vocab_size=_number(row, "vocab", vocab_size),
        length=_number(row, "seq", 2048),
    )


MEGATRON_2022: dict[str, Any] = {
    "sharding": "replicated",
    "sequence_parallel": False,
    "flash": False,
    "causal": False,
    "dropout": True,
    "pointwise": "fused",
    "overlaps_gradients": False,
    "overlaps_pipeline": False,
    "gradient_bytes": 2,
    "stored_weight_bytes": 2,
    "master_bytes": 12,
    "accumulation_bytes": 6,
}
"""Megatron-LM and Megatron-DeepSpeed until 2022: scores are stored, and gradients reduced after the backward pass.

Each microbatch adds its fp16 gradients to the earlier ones: two are read and one is written.
"""


def _degrees(row: Row) -> dict[str, Any]:
    tp, pp, cp = (_number(row, name) for name in ("tp", "pp", "cp"))
    dp = _number(row, "dp", _number(row, "gpus") // (tp * pp * cp))
    return {"tp": tp, "pp": pp, "cp": cp, "dp": dp, "ep": _number(row, "ep"), "length": _number(row, "seq", 2048)}


def _batch(row: Row, dp: int, default: int = 1) -> dict[str, int]:
    size = _number(row, "mbs", default)
    return {"microbatch_size": size, "num_microbatches": max(1, _number(row, "gbs") // (dp * size))}


def _vtrain(row: Row) -> Measured:
    """Full recomputation (note of the file). One node: GPT-2's vocabulary, not padded without tensor parallelism."""
    is_single = "single" in row["source"]
    degrees = _degrees(row)
    vocab = 50257 if is_single and degrees["tp"] == 1 else 51200
    layout = PlanLayout(**degrees, **_batch(row, degrees["dp"]), recompute="full", **MEGATRON_2022)
    name = "vTrain single-node" if is_single else "vTrain multi-node"
    return Measured(name, "a100-80-4hdr", _gpt(row, vocab), (layout,), float(row["step_s"]), None, row)


def _korthikanti(row: Row) -> Measured:
    """Sequence parallelism only with selective recomputation; interleaved stages as given; fp16 and fp32 masters.

    From 2022 on, products add to the earlier gradients, and collectives of the backward pass overlap weight gradients.
    """
    degrees = _degrees(row)
    selective = "selective" in row["recompute"]
    traits = MEGATRON_2022 | {
        "sequence_parallel": selective,
        "accumulation_bytes": 0,
        "overlaps_weight_gradients": True,
    }
    layout = PlanLayout(
        **degrees,
        **_batch(row, degrees["dp"]),
        stages_per_rank=_number(row, "vp"),
        recompute="selective" if selective else "full",
        **traits,
    )
    memory = float(row["mem_gib"]) * 2**30 if row["mem_gib"] else None
    return Measured("Korthikanti", "a100-80-dgx", _gpt(row), (layout,), float(row["step_s"]), memory, row)


def _sc21(row: Row) -> Measured | None:
    """Microbatch and stages per rank are absent: the authors tuned them, so the fastest that the planner finds."""
    degrees = _degrees(row)
    shape, gpus = _gpt(row), _number(row, "gpus")
    flops = 96 * _number(row, "gbs") * 2048 * shape.num_layers * shape.hidden_size**2
    flops *= 1 + 2048 / (6 * shape.hidden_size) + shape.vocab_size / (16 * shape.num_layers * shape.hidden_size)
    seconds = float(row["step_s"]) if row["step_s"] else flops / (float(row["tflops_gpu"]) * 1e12 * gpus)
    name = "MT-NLG" if "turing" in row["source"] else "SC21"
    traits = MEGATRON_2022
    if name == "MT-NLG":  # bf16, with gradients in fp32
        traits = MEGATRON_2022 | {"gradient_bytes": 4, "accumulation_bytes": 10}
    base = PlanLayout(**degrees, recompute="full", **traits)
    tuned = _tuned(base, _number(row, "gbs"), shape)
    return Measured(name, "a100-80-dgx", shape, tuned, seconds, None, row)


def _megatron_h100(row: Row) -> Measured:
    """Model FLOPs with full attention; microbatch, stages per rank and recomputation are absent: the fastest.

    Transformer Engine fuses pointwise operators, and tensor-parallel collectives overlap products, as the source says.
    """
    degrees = _degrees(row)
    shape, gpus = _gpt(row), _number(row, "gpus")
    flops = shape.flops_per_token(4096, causal=False) * _number(row, "gbs") * 4096
    base = PlanLayout(
        **degrees,
        sharding="optimizer",
        causal=True,
        gradient_bytes=4,
        weight_bytes=2,
        overlaps_weight_gradients=True,
        overlaps_tensor=0.5,
        pointwise="fused",
    )
    tuned = _tuned(base, _number(row, "gbs"), shape)
    seconds = flops / (float(row["tflops_gpu"]) * 1e12 * gpus)
    return Measured("Megatron H100", "h100-dgx", shape, tuned, seconds, None, row)


def _tuned(base: PlanLayout, global_size: int, shape: DecoderShape) -> tuple[PlanLayout, ...]:
    per_rank = global_size // base.dp
    sizes = [size for size in (1, 2, 4, 8) if per_rank % size == 0]
    layers = shape.num_layers // base.pp
    stages = [v for v in (1, 2, 3, 4, 6) if base.pp > 1 and layers % v == 0 and per_rank % base.pp == 0] or [1]
    return tuple(
        replace(base, microbatch_size=size, num_microbatches=per_rank // size, stages_per_rank=v)
        for size in sizes
        for v in stages
        if v == 1 or (per_rank // size) % base.pp == 0
    )


def _foundry(row: Row) -> Measured | None:
    """FSDP with bf16 communication, flash attention, no dropout."""
    clusters = {"a100_40gb": "a100-40-dgx", "a100_80gb": "a100-80-dgx", "h100_80gb": "h100-dgx"}
    degrees = _degrees(row)
    fp8 = "fp8" in row["precision"]
    layout = PlanLayout(
        **degrees,
        **_batch(row, degrees["dp"]),
        recompute="full" if row["recompute"] == "full" else "none",
        gradient_bytes=2,
        reduces_each_microbatch=True,
        dtype="fp8" if fp8 else "bf16",
    )
    cluster = clusters[row["gpu"]]
    return Measured(f"llm-foundry {cluster}", cluster, _gpt(row), (layout,), float(row["step_s"]), None, row)


LLAMA = {
    "8": (4096, 32, 32, 8, 14336),
    "13": (5120, 40, 40, 8, 17920),
    "14": (5120, 40, 40, 8, 17920),
    "70": (8192, 80, 64, 8, 28672),
    "405": (16384, 126, 128, 8, 53248),
}


def llama(name: str, vocab_size: int = 128256) -> DecoderShape:
    """Return the shape of a Llama-3 model by its size in billions, such as "70"."""
    hidden, layers, heads, kv_heads, inner = LLAMA[name]
    return DecoderShape(
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate_size=inner,
    )


def _titan(row: Row) -> Measured:
    """FSDP2 with fp32 masters, tensor parallelism with sequence parallelism, compiled layers.

    Selective recomputation saves every other matrix product.
    """
    degrees = _degrees(row)
    layout = PlanLayout(
        **degrees,
        **_batch(row, degrees["dp"]),
        recompute="full" if row["recompute"] == "full" else "selective",
        saved_products=0.5,
        pointwise="compiled",
        dtype="fp8" if "fp8" in row["precision"] else "bf16",
        overlaps_tensor=0.5 if "async" in row["precision"] else 0.0,
    )
    size = row["params_b"].partition(".")[0]
    memory = float(row["mem_gib"]) * 2**30 if row["mem_gib"] else None
    return Measured("torchtitan", "h100-dgx", llama(size), (layout,), float(row["step_s"]), memory, row)


def _kempner(row: Row) -> Measured:
    """Parameters, gradients, Adam moments and loss in bf16; memory in GB as printed.

    Gradients are reduced in the last microbatch. Tensor-parallel ranks gather the logits, and do not split sequences.
    The loss holds logits, log-softmax, and a gradient of each. The eighth row is not compiled.
    """
    degrees = _degrees(row)
    size = row["params_b"].partition(".")[0]
    layout = PlanLayout(
        **degrees,
        **_batch(row, degrees["dp"]),
        recompute="full",
        gradient_bytes=2,
        kept_gradient_bytes=2,
        stored_weight_bytes=2,
        master_bytes=4,
        pointwise="eager" if (size, degrees["dp"]) == ("8", 8) else "compiled",
        sequence_parallel=False,
        loss_bytes=8,
        gathers_logits=True,
    )
    memory = float(row["mem_gib"]) * 1e9
    return Measured("KempnerForge", "h200-dgx", llama(size), (layout,), float(row["step_s"]), memory, row)


_SOURCES: dict[str, Callable[[Row], Measured | None]] = {
    "vTrain": _vtrain,
    "calculon": _korthikanti,
    "cases_april2021": _sc21,
    "llm-analysis": _sc21,
    "model_table": _megatron_h100,
    "llm-foundry": _foundry,
    "torchtitan": _titan,
    "KempnerForge": _kempner,
}
