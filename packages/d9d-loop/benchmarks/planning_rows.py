"""Published measurements as inputs of the planner: model, layout and cluster of each row, and its step time.

Values that a source does not state are set by a rule for the whole source, in the docstring of its function; no rule
depends on the measured value. Models are described by the sizes of plain GPTs or decoders.
"""

import csv
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from d9d_loop.planning import DecoderShape, PlanLayout, memory_of
from d9d_loop.planning.plan_layout import Captured, Dispatch

Row = dict[str, str]


@dataclass(frozen=True)
class Measured:
    """One measured step.

    Attributes:
        group: Name of the rows of one source and cluster.
        cluster: Name of the hardware description.
        tuned: The layout; if the source does not state it, the layouts from which the authors chose the fastest.
        seconds: Measured step time; `None` without one.
        memory: Measured peak memory in bytes; `None` without one.
        passes: Number of times that a step runs the pipeline with the microbatches of `tuned`, and empties it.
        counted: Name of the value of `Memory` that the source measured or computed.
    """

    group: str
    cluster: str
    shape: DecoderShape
    tuned: tuple[PlanLayout, ...]
    seconds: float | None
    memory: float | None
    row: Row
    counted: str = "reserved"
    passes: int = 1

    @property
    def unstated(self) -> tuple[str, ...]:
        """Names of the settings of the layout that the source does not state; "n/a" states that there is none."""
        is_sparse, is_pipelined = self.shape.num_experts > 0, self.tuned[0].pp > 1
        names = ("tp", "pp", "mbs", "seq", "recompute", *["vp"] * is_pipelined, *["ep"] * is_sparse)
        blank = tuple(name for name in names if self.row[name] in ("", "-"))
        return (*blank, "seq") if "seq not stated" in self.row["note"] else blank


def read(path: Path) -> Iterator[Measured]:
    """Yield the rows of a file that the planner can describe."""
    yield from filter(None, (found for _, found in _rows(path)))


def unread(path: Path) -> Iterator[Row]:
    """Yield the other rows: a reader returns `None` for a model that it does not know."""
    return (row for row, found in _rows(path) if found is None)


def _rows(path: Path) -> Iterator[tuple[Row, Measured | None]]:
    with path.open() as file:
        rows: list[Row] = list(csv.DictReader(file))
    for row in rows:
        reader = next((reader for part, reader in _SOURCES.items() if part in row["source"]), None)
        yield row, reader(row) if reader is not None else None


_BLANK = ("", "n/a", "-")


def _number(row: Row, name: str, default: int = 1) -> int:
    text = row[name]
    return int(float(text)) if text not in _BLANK else default


def _gpt(row: Row, vocab_size: int = 51200) -> DecoderShape:
    hidden, layers = int(row["hidden"]), int(row["layers"])  # no defaults: a model of unknown sizes is an error
    return DecoderShape.gpt(
        hidden_size=hidden,
        num_layers=layers,
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
    "accumulates_first": True,
    "recomputes_last": True,
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
    """Read a row of vTrain: full recomputation, as the file notes.

    On one node the vocabulary is GPT-2's, without padding if there is no tensor parallelism.
    """
    is_single = "single" in row["source"]
    degrees = _degrees(row)
    vocab = 50257 if is_single and degrees["tp"] == 1 else 51200
    layout = PlanLayout(**degrees, **_batch(row, degrees["dp"]), recompute="full", **MEGATRON_2022)
    name = "vTrain single-node" if is_single else "vTrain multi-node"
    return Measured(name, "a100-80-4hdr", _gpt(row, vocab), (layout,), float(row["step_s"]), None, row)


def _korthikanti(row: Row) -> Measured:
    """Read a row of Korthikanti et al.: sequence parallelism only with selective recomputation; fp16, fp32 masters.

    Stages per rank are as stated. From 2022 on, matrix products accumulate into the earlier gradients, and collectives
    of the backward pass overlap with weight gradients.
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
    seconds = float(row["step_s"])
    return Measured("Korthikanti", "a100-80-dgx", _gpt(row), (layout,), seconds, memory, row, "saved")


def _sc21(row: Row) -> Measured | None:
    """Read a row of SC21 or MT-NLG, whose authors tuned microbatch size and stages per rank without stating them."""
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
    """Read a row of Megatron on H100s: microbatch size and stages per rank are not stated; no recomputation.

    Model FLOPs count full attention. Transformer Engine fuses pointwise operators, and tensor-parallel collectives
    overlap with products, as the source says.
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
        overlaps_tensor=True,
        pointwise="fused",
        attention_speed=2,
    )
    tuned = _tuned(base, _number(row, "gbs"), shape)
    seconds = flops / (float(row["tflops_gpu"]) * 1e12 * gpus)
    return Measured("Megatron H100", "h100-dgx", shape, tuned, seconds, None, row)


def _tuned(base: PlanLayout, global_size: int, shape: DecoderShape) -> tuple[PlanLayout, ...]:
    """Return the layouts from which authors could choose: those whose predicted memory fits 80 GB, or the smallest."""
    per_rank = global_size // base.dp
    sizes = [size for size in (1, 2, 4, 8) if per_rank % size == 0]
    layers = shape.num_layers // base.pp
    stages = [v for v in range(1, layers + 1) if base.pp > 1 and layers % v == 0] or [1]
    tuned = [
        replace(base, microbatch_size=size, num_microbatches=per_rank // size, stages_per_rank=v)
        for size in sizes
        for v in stages
        if v == 1 or (per_rank // size) % base.pp == 0
    ]
    needed = [max(memory_of(shape, each, index).total for index in {0, each.pp - 1}) for each in tuned]
    return tuple(each for each, size in zip(tuned, needed, strict=True) if size <= max(80e9, min(needed)))


def _foundry(row: Row) -> Measured | None:
    """Read a row of llm-foundry: FSDP with bf16 communication, no dropout, and FlashAttention 1, as in its script.

    Its README says that the tables were made before PyTorch 2.0, which recomputes whole layers.

    FlashAttention 2 is 1.3 to 1.5 times faster (Dao 2023, https://arxiv.org/abs/2307.08691, section 4.1).
    """
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
        attention_speed=0.7,
        copies_shards=False,
        recomputes_last=True,
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


def llama(name: str, vocab_size: int = 128256) -> DecoderShape | None:
    """Return the shape of a Llama-3 model by its size in billions, such as "70"; `None` for an unknown size."""
    if name not in LLAMA:
        return None
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


def _llama_of(row: Row) -> DecoderShape | None:
    """Return the shape of a row's Llama by its number of parameters; `None` for an unknown size or another model."""
    return llama(row["params_b"].partition(".")[0]) if row["model"].startswith("Llama") else None


def _titan(row: Row) -> Measured | None:
    """Read a row of torchtitan: FSDP2 with fp32 masters, tensor and sequence parallelism; reserved memory.

    Without a stated microbatch size, the number of microbatches is that of the pipeline stages, as by default. The
    schedules wait for sends. Selective recomputation saves every other matrix product. Rows of the first file are not
    compiled unless they say so. Without tensor parallelism, the loss reserves 14 bytes per logit. DTensor's parallel
    loss adds an exponential and a sum in fp32, while log-softmax and gradient exist: 18 bytes.
    """
    degrees = _degrees(row)
    batch = _batch(row, degrees["dp"])
    if row["mbs"] in _BLANK and degrees["pp"] > 1:
        stages, local = degrees["pp"] * _number(row, "vp"), _number(row, "gbs") // degrees["dp"]
        batch = {"microbatch_size": max(1, local // stages), "num_microbatches": min(local, stages)}
    is_compiled = "compile" in row["precision"] or "asyncTP" in row["source"]
    layout = PlanLayout(
        **degrees,
        **batch,
        stages_per_rank=_number(row, "vp"),
        recompute="full" if row["recompute"] == "full" else "selective",
        saved_products=0.5,
        pointwise="compiled" if is_compiled else "eager",
        dtype="fp8" if "fp8" in row["precision"] else "bf16",
        overlaps_tensor="async" in row["precision"],
        overlaps_pipeline=False,
        ring_attention=True,
        backward_collectives=1.0 if row["recompute"] == "full" else 1.5,
        loss_bytes=18 if degrees["tp"] > 1 else 14,
    )
    shape = _llama_of(row)
    if shape is None:
        return None
    memory = float(row["mem_gib"]) * 2**30 if row["mem_gib"] else None
    return Measured("torchtitan", "h100-96-500w", shape, (layout,), float(row["step_s"]), memory, row)


def _kempner(row: Row) -> Measured | None:
    """Read a row of KempnerForge: parameters, gradients, Adam moments and loss in bf16; peak of allocated tensors.

    Its "GB" are GiB (`kempnerforge/metrics/memory.py`), and its nodes have four devices. FSDP2 reduces gradients in
    fp32, in the last microbatch. Tensor-parallel ranks gather the logits, split sequences, and each
    hold the whole embedding (`kempnerforge/distributed/tensor_parallel.py`). The loss holds logits,
    log-softmax, and a gradient of each. The 8B model on 8 data-parallel ranks is not compiled. The script of the
    sweep runs 7B on 1 and 2 data-parallel ranks with microbatches of 2 (`mfu_bench.sh`). Without data parallelism, the
    whole model is one compiled graph, which returns all gradients at once and adds them to those of earlier ones.
    """
    degrees = _degrees(row)
    size = row["params_b"].partition(".")[0]
    shape = _llama_of(row)
    if shape is None:
        return None
    batch = _batch(row, degrees["dp"])
    if "mfu_scaling" in row["source"] and (size, degrees["tp"]) == ("8", 1) and degrees["dp"] < 4:
        batch = {"microbatch_size": 2, "num_microbatches": 4}
    is_eager = (size, degrees["dp"], degrees["tp"]) == ("14", 8, 1)
    layout = PlanLayout(
        **degrees,
        **batch,
        recompute="full",
        gradient_bytes=4,
        kept_gradient_bytes=4 if degrees["dp"] == 1 else 2,
        accumulation_bytes=6 if degrees["dp"] == 1 else 0,
        backward_collectives=7 / 4,
        attention_speed=2,
        stored_weight_bytes=2,
        master_bytes=4,
        pointwise="eager" if is_eager else "compiled",
        fuses_norms=not is_eager,
        fuses_rotary=not is_eager,
        loss_bytes=8,
        splits_embedding=False,
        gathers_logits=True,
    )
    memory = float(row["mem_gib"]) * 2**30
    seconds = float(row["step_s"])
    return Measured("KempnerForge", "h200-4ndr", shape, (layout,), seconds, memory, row, "model")


_SPARSE = {
    "Qwen3_30B_a3B": DecoderShape(
        vocab_size=151936,
        hidden_size=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        intermediate_size=6144,
        num_experts=128,
        top_k=8,
        expert_size=768,
    ),
    "Qwen3_235B_a22B": DecoderShape(
        vocab_size=151936,
        hidden_size=4096,
        num_layers=94,
        num_heads=64,
        num_kv_heads=4,
        head_dim=128,
        intermediate_size=12288,
        num_experts=128,
        top_k=8,
        expert_size=1536,
    ),
    "DeepSeekV3": DecoderShape(
        vocab_size=129280,
        hidden_size=7168,
        num_layers=61,
        num_heads=128,
        num_kv_heads=128,
        head_dim=128,
        intermediate_size=18432,
        num_experts=256,
        top_k=8,
        expert_size=2048,
        num_dense_layers=3,
        shared_size=2048,
        latent=(1536, 512, 64, 128),
    ),
    "Kimi_K2": DecoderShape(
        vocab_size=163840,
        hidden_size=7168,
        num_layers=61,
        num_heads=64,
        num_kv_heads=64,
        head_dim=128,
        intermediate_size=18432,
        num_experts=384,
        top_k=8,
        expert_size=2048,
        num_dense_layers=1,
        shared_size=2048,
        latent=(1536, 512, 64, 128),
    ),
    "GPT OSS 120B": DecoderShape(
        vocab_size=201088,
        hidden_size=2880,
        num_layers=36,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        intermediate_size=2880,
        num_experts=128,
        top_k=4,
        expert_size=2880,
        biased_experts=True,
        window=128,
    ),
    "GPT OSS 20B": DecoderShape(
        vocab_size=201088,
        hidden_size=2880,
        num_layers=24,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        intermediate_size=2880,
        num_experts=32,
        top_k=4,
        expert_size=2880,
        biased_experts=True,
        window=128,
    ),
}
"""Published sparse decoders."""


def _whole_stages(layout: PlanLayout, shape: DecoderShape) -> PlanLayout:
    """Return the layout, with embedding and head counted as layers if the stages do not divide the layers evenly."""
    missing = -shape.num_layers % layout.num_stages
    return replace(layout, virtual_layers=(missing // 2, missing - missing // 2))


_BRIDGE_CLUSTERS = {
    "DGX-H100": "h100-dgx",
    "DGX-B200": "b200-dgx",
    "DGX-B300": "b300-dgx",
    "DGX-GB200": "gb200-nvl72",
    "DGX-GB300": "gb300-nvl72",
}


# Models of recipes for a device that capture a whole step in a graph, group the products of experts, and overlap
# all-to-alls, in MXFP8 from release 26.06 on; then attention has float8 products too, except in the last one.
_WHOLE_STEP = {
    "Qwen3_30B_a3B": ("B300", "GB200", "GB300"),
    "Qwen3_235B_a22B": ("GB200", "GB300"),
    "GPT OSS 120B": ("GB200", "GB300"),
    "DeepSeekV3": ("GB300", "GB200"),
}
# Other recipes, by model, device, microbatch size and expert-parallel degree: operators in captured graphs, rows that
# the dispatcher sends, and whether all-to-alls overlap. By default none, a row for each node, and False.
_RECIPES: dict[tuple[str, str, int, int], tuple[Captured, Dispatch, bool]] = {
    ("Qwen3_30B_a3B", "B200", 1, 8): ("router", "rows", False),
    ("Qwen3_30B_a3B", "B200", 4, 8): ("attention", "nodes", False),
    ("Qwen3_30B_a3B", "B300", 8, 8): ("router", "nodes", False),
    ("Qwen3_30B_a3B", "GB200", 4, 8): ("router", "nodes", False),
    ("Qwen3_30B_a3B", "GB300", 8, 8): ("router", "nodes", False),
    ("Qwen3_30B_a3B", "H100", 1, 8): ("none", "nodes", True),
    ("Qwen3_235B_a22B", "B200", 1, 8): ("none", "rows", False),
    ("Qwen3_235B_a22B", "B300", 1, 8): ("none", "rows", True),
    ("Qwen3_235B_a22B", "GB200", 1, 32): ("attention", "nodes", False),
    ("Qwen3_235B_a22B", "GB300", 2, 32): ("attention", "nodes", False),
    ("Qwen3_235B_a22B", "H100", 1, 32): ("none", "rows", True),
    ("DeepSeekV3", "B300", 2, 8): ("attention", "nodes", False),
    ("DeepSeekV3", "GB200", 1, 64): ("attention", "nodes", False),
    ("GPT OSS 120B", "B300", 4, 8): ("attention", "nodes", False),
    ("GPT OSS 120B", "B300", 4, 64): ("attention", "rows", False),
    ("GPT OSS 120B", "GB200", 4, 64): ("none", "rows", False),
    ("GPT OSS 120B", "GB300", 4, 64): ("attention", "rows", False),
    ("GPT OSS 120B", "H100", 1, 8): ("none", "rows", False),
}


def _recipe(row: Row, ep: int) -> dict[str, Any]:
    """Return the traits of a recipe for a sparse model (`scripts/performance/configs`, v0.3.0 to v0.5.0)."""
    model, device = row["model"], row["gpu"].removeprefix("DGX-")
    if row["system"].split()[1] >= "26.06" and row["precision"] == "MXFP8" and device in _WHOLE_STEP.get(model, ()):
        # Products of attention in float8 make it about 1.5 times faster (Shah et al. 2024, figures 5 and 6).
        speed = 2 if (model, device) == ("DeepSeekV3", "GB200") else 3
        return {
            "captured": "step",
            "groups_experts": True,
            "overlaps_experts": True,
            "dispatch": "nodes",
            "attention_speed": speed,
        }
    captured, dispatch, overlaps = _RECIPES.get((model, device, _number(row, "mbs"), ep), ("none", "nodes", False))
    return {"captured": captured, "groups_experts": False, "overlaps_experts": overlaps, "dispatch": dispatch}


def _bridge(row: Row) -> Measured | None:
    """Read a row of Megatron-Bridge: recipes with recomputation only of small modules, fused operators, bf16 gradients.

    Experts are sharded like other parameters, and tensor parallelism splits the shared expert. Adapters (LoRA) and
    models with layers other than attention and feed-forward are not read.
    """
    if "LoRA" in row["model"]:
        return None
    size = re.fullmatch(r"LLAMA3(?:\.1)?_(\d+)B(?: SFT.*)?", row["model"])
    shape = llama(size[1]) if size else _SPARSE.get(row["model"])
    if shape is None:
        return None
    if row["model"] == "DeepSeekV3":  # plus a layer for multi-token prediction
        shape = replace(shape, num_layers=62)
    degrees = _degrees(row)
    fsdp = row["sharding"] not in ("", "FSDP 0") or (not shape.num_experts and degrees["tp"] * degrees["pp"] == 1)
    layout = PlanLayout(
        **degrees,
        **_batch(row, degrees["dp"]),
        stages_per_rank=_number(row, "vp") if degrees["pp"] > 1 else 1,
        sharding="parameters" if fsdp else "optimizer",
        reduces_each_microbatch=fsdp,
        gradient_bytes=2,
        overlaps_weight_gradients=True,
        overlaps_pipeline=_number(row, "vp") > 1,
        overlaps_tensor=row["precision"] != "NVFP4",
        pointwise="fused",
        dtype={"BF16": "bf16", "NVFP4": "fp4"}.get(row["precision"], "fp8"),
        routing_skew=1.0,
        attention_speed=2,
        copies_shards=False,
        shards_experts=False,
        splits_shared_experts=True,
    )
    if shape.num_experts:
        layout = replace(layout, **_recipe(row, degrees["ep"]))
    if shape.latent and layout.attention_speed == 2:  # recomputes the products that expand queries, keys and values
        q, kv, rope, value = shape.latent
        expanded = shape.num_heads * (q * (shape.head_dim + rope) + kv * (shape.head_dim + value))
        every = shape.attention_parameters + 3 * shape.hidden_size * (
            shape.top_k * shape.expert_size + shape.shared_size
        )
        layout = replace(layout, recompute="selective", saved_products=1 - expanded / every)
    layout = _whole_stages(layout, shape)
    cluster = _BRIDGE_CLUSTERS[row["gpu"]]
    return Measured(f"Megatron-Bridge {cluster}", cluster, shape, (layout,), float(row["step_s"]), None, row)


# Layers of a pipeline stage in the recipes of AutoModel, by number of devices.
_STAGE_LAYERS = {256: 2, 1024: 4}


def _automodel(row: Row) -> Measured | None:
    """Read a row of AutoModel: pre-training with FSDP2 as in its recipes (`examples/llm_benchmark`), and fp32 masters.

    Sparse models: norms and gates are fused kernels, rotary embeddings are not, each expert has a product, and the loss
    does not cast logits. All but GPT OSS recompute layers, use the attention of Transformer Engine, and gather weights
    and reduce gradients once per step; with pipelines, the reduction follows the last backward pass of a stage
    (`fsdp_mixin.py`). GPT OSS has FlexAttention, and reduces gradients in each microbatch. The router gives a token
    consecutive experts. Pipelines run local batches of 8 samples one after another, and wait for sends, as PyTorch's
    schedules do; the layers of a stage are those of the recipe, with the number of stages rounded down to a multiple of
    the ranks. The dense model is compiled and reduces gradients in bf16 (`FSDP2Config.mp_policy`), and PyTorch calls
    the attention of cuDNN on H100 since version 2.10. Rows of adapters (LoRA), and models with layers other than
    attention and feed-forward, are not read.
    """
    names = {"DeepSeek V3 671B": "DeepSeekV3", "Qwen3 MoE 30B": "Qwen3_30B_a3B"}
    name = names.get(row["model"], row["model"].replace("-OSS", " OSS"))
    shape = llama("70") if name == "Llama3 70B" else _SPARSE.get(name)
    if shape is None:
        return None
    degrees = _degrees(row)
    batch, passes = _batch(row, degrees["dp"]), 1
    if not shape.num_experts:
        layout = PlanLayout(
            **degrees,
            **batch,
            recompute="full",
            reduces_each_microbatch=True,
            gradient_bytes=2,
            pointwise="compiled",
            attention_speed=2,
        )
        return Measured("AutoModel", "h100-dgx", shape, (layout,), float(row["step_s"]), None, row)
    if row["ep"] in _BLANK:
        degrees["ep"] = degrees["dp"]
    is_gpt, is_pipelined = name.startswith("GPT"), degrees["pp"] > 1
    stages = 1
    if is_pipelined:
        passes, batch["num_microbatches"] = batch["num_microbatches"] // 8, 8
        stages = ceil(shape.num_layers / _STAGE_LAYERS[_number(row, "gpus")]) // degrees["pp"]
    layout = PlanLayout(
        **degrees,
        **batch,
        stages_per_rank=stages,
        recompute="none" if is_gpt else "full",
        attention_speed=1 if is_gpt else 2,
        sharding="parameters" if is_gpt or is_pipelined else "optimizer",
        reduces_each_microbatch=is_gpt,
        overlaps_gradients=not is_pipelined,
        overlaps_pipeline=False,
        accumulation_bytes=0 if is_gpt else 6,
        pointwise="fused",
        fuses_gate=True,
        fuses_rotary=False,
        casts_loss=False,
        dispatch="nodes",
        adjacent_experts=True,
        routing_skew=1.0,
        groups_experts=False,
    )
    return Measured("AutoModel", "h100-dgx", shape, (layout,), float(row["step_s"]), None, row, passes=passes)


def _meta(row: Row) -> Measured | None:
    """Read a row of Llama 3 405B: 16 Mi tokens per step, rows of 8,192 or, with context parallelism, 131,072 tokens.

    No recomputation with short sequences (Llama Team 2024, https://arxiv.org/abs/2407.21783, section 3.3.2); gradients
    and optimizer states are sharded. FLOPs count causal attention. Stages per rank are not stated.
    """
    shape = llama("405") if row["model"] == "Llama-3 405B" else None
    if shape is None:
        return None
    length = 131072 if _number(row, "cp") > 1 else 8192
    degrees: dict[str, Any] = {**_degrees(row), "length": length}
    base = PlanLayout(
        **degrees,
        sharding="gradients",
        gradient_bytes=4,
        pointwise="fused",
        overlaps_weight_gradients=True,
        attention_speed=2,
    )
    size = 2**24 // length
    tuned = tuple(
        _whole_stages(replace(base, num_microbatches=size // base.dp, stages_per_rank=v), shape) for v in (1, 2, 4, 8)
    )
    flops = shape.flops_per_token(length) * 2**24
    seconds = flops / (float(row["tflops_gpu"]) * 1e12 * _number(row, "gpus"))
    return Measured("Meta", "h100-dgx", shape, tuned, seconds, None, row)


_QWEN3_4B = DecoderShape(
    vocab_size=151936,
    hidden_size=2560,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=9728,
    tie_embeddings=True,
)
_PRIME = {
    "Qwen3-0.6B": replace(_QWEN3_4B, hidden_size=1024, num_layers=28, num_heads=16, intermediate_size=3072),
    "Qwen3-4B": _QWEN3_4B,
    "Qwen3-30B-A3B": _SPARSE["Qwen3_30B_a3B"],
}


def _prime(row: Row) -> Measured | None:
    """Read a row of prime-rl: full fine-tuning with FSDP2, eager operators, full recomputation, no expert parallelism.

    Rows of reinforcement learning are not read: the file says that their throughput does not equal tokens over time.
    """
    clusters = {"NVIDIA B200": "b200-dgx", "NVIDIA H200": "h200-dgx", "NVIDIA H100 80GB HBM3": "h100-dgx"}
    cluster = clusters.get(row["gpu"])
    if not row["system"].endswith("sft") or cluster is None:
        return None
    shape = _PRIME.get(row["model"].removeprefix("Qwen/").removesuffix("-Instruct-2507"))
    if shape is None:
        return None
    degrees = _degrees(row)
    layout = PlanLayout(
        **degrees,
        **_batch(row, degrees["dp"]),
        recompute="full",
        reduces_each_microbatch=True,
        attention_speed=2 if "flash_attention_3" in row["note"] else 1,
    )
    memory = float(row["mem_gib"]) * 2**30
    return Measured(f"prime-rl {cluster}", cluster, shape, (layout,), float(row["step_s"]), memory, row)


_SOURCES: dict[str, Callable[[Row], Measured | None]] = {
    "Megatron-Bridge": _bridge,
    "Automodel": _automodel,
    "glennklockwood": _meta,
    "prime-rl": _prime,
    "vTrain": _vtrain,
    "calculon": _korthikanti,
    "cases_april2021": _sc21,
    "llm-analysis": _sc21,
    "model_table": _megatron_h100,
    "llm-foundry": _foundry,
    "torchtitan": _titan,
    "KempnerForge": _kempner,
}
