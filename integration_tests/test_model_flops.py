"""Model FLOPs of a microbatch equal hand counts: weights of the products, and loops over the pairs of a mask.

Hand counts are per multiply-add, so FLOPs are twice the numbers here.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from d9d_dist import DistributedContext, MeshConfig, StageInfo
from d9d_dist.testing import run_ranks
from d9d_loop import Loss, ModelProvider, Task, Trainer, TrainerConfig
from d9d_loop.job.flop_measurement import measure_flops
from d9d_loop.job.flop_meter import FlopMeter
from d9d_loop.jobs.text_tasks import NextToken
from d9d_loop.model.built_model import meta_copy
from d9d_loop.task import to_inputs
from d9d_loop.tasks import NextTokenTask
from d9d_loop.testing import parse_layout
from d9d_metrics import read_metrics
from d9d_modules import (
    CheckpointPolicy,
    DecoderForCausalLM,
    Gemma3Params,
    Llama3Params,
    Qwen3Params,
    checkpoint_layers,
    parallelize_decoder,
)
from d9d_moe import DeepseekV3Params, GptOssParams, Qwen3MoeParams, Qwen3NextParams
from d9d_peft import LoRA, inject

REHEARSES = True  # see quick_jobs.py

VOCAB, HIDDEN, HEADS, KEYS, DIM, INNER, LENGTH = 32, 12, 4, 2, 6, 20, 16
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_layers": 2, "num_heads": HEADS, "num_kv_heads": KEYS,
    "head_dim": DIM, "intermediate_size": INNER,
}  # fmt: skip
PROJECTIONS = HIDDEN * DIM * (2 * HEADS + 2 * KEYS)
DENSE = 2 * (PROJECTIONS + 3 * HIDDEN * INNER) + HIDDEN * VOCAB
"""Weights of the products of two dense layers and the head."""
PACKED = [[5, 8], [16], [1, 2, 10]]
"""Lengths of the documents of each row; the rest of a row is padding."""


def packed_batch(rows: list[list[int]] = PACKED) -> dict[str, Tensor]:
    shape = len(rows), LENGTH
    batch = {"input_ids": torch.ones(shape, dtype=torch.int64), "labels": torch.full(shape, -100)}
    batch |= {"documents": torch.zeros(shape, dtype=torch.int64), "position_ids": torch.zeros(shape, dtype=torch.int64)}
    for row, lengths in enumerate(rows):
        start = 0
        for number, length in enumerate(lengths):
            place = slice(start, start := start + length)
            batch["labels"][row, place], batch["documents"][row, place] = 1, number
            batch["position_ids"][row, place] = torch.arange(length)
        batch["documents"][row, start:] = len(lengths)
    return batch


def pairs(sees: Callable[[int, int], bool], rows: list[list[int]] = PACKED) -> int:
    """Return the pairs of positions of the same document that a mask of positions of a row allows."""
    total = 0
    for lengths in rows:
        ids = np.repeat(np.arange(len(lengths)), lengths)
        for query in range(len(ids)):
            total += sum(bool(ids[query] == ids[key]) and sees(query, key) for key in range(len(ids)))
    return total


def causal(query: int, key: int) -> bool:
    return key <= query


def window(size: int) -> Callable[[int, int], bool]:
    return lambda query, key: query - size < key <= query


def whole_rows(num_rows: int) -> dict[str, Tensor]:
    ids = torch.ones(num_rows, LENGTH, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}


def counted(model: nn.Module, task: Task, measured: Any, *batches: Any) -> float:
    """Return the multiply-adds of batches, with the formula that another microbatch gives."""
    formula, _ = measure_flops(meta_copy(model), task, measured)
    meter = FlopMeter(formula, task)
    for batch in batches:
        meter.add(to_inputs(task.inputs(batch)), batch)
    return float(meter.take()) / 2


TOKENS = sum(map(sum, PACKED))
ONE_HEAD = 3 * HEADS * 2 * DIM
"""Multiply-adds of a pair in a step, of one layer: three times the product with keys and with values."""
OTHER = packed_batch([[3], [7, 6]])


def packed(params: Any) -> float:
    return counted(DecoderForCausalLM(params), NextTokenTask(), OTHER, packed_batch())


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the functions that a measurement replaces, as its process would end."""
    from d9d_modules.attention_backends.choice import ChosenAttention  # noqa: PLC0415

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", nn.functional.scaled_dot_product_attention)
    monkeypatch.setattr(ChosenAttention, "__call__", ChosenAttention.__call__)


def test_packed_documents_of_dense_causal_attention() -> None:
    assert packed(Llama3Params(**SIZES)) == 3 * TOKENS * DENSE + 2 * ONE_HEAD * pairs(causal)


def test_sliding_windows_in_some_layers() -> None:
    params = Qwen3Params(**SIZES, sliding_window=4, sliding_layers=(1,))
    assert packed(params) == 3 * TOKENS * DENSE + ONE_HEAD * (pairs(causal) + pairs(window(4)))


def test_windows_of_bidirectional_attention() -> None:
    params = Gemma3Params(
        **SIZES,
        sliding_window=3,
        sliding_layers=(0,),
        sliding_rope_theta=10.0,
        query_pre_attn_scalar=6,
        is_causal=False,
    )
    allowed = pairs(lambda query, key: True) + pairs(lambda query, key: abs(query - key) < 3)
    assert packed(params) == 3 * TOKENS * DENSE + ONE_HEAD * allowed


def test_experts_count_for_their_tokens_and_shared_experts_for_all() -> None:
    sparse: dict[str, Any] = {**SIZES, "num_experts": 8, "top_k": 3, "expert_intermediate_size": 8}
    per_token = 2 * (PROJECTIONS + HIDDEN * 8 + 3 * 3 * HIDDEN * 8) + HIDDEN * VOCAB
    assert packed(Qwen3MoeParams(**sparse)) == 3 * TOKENS * per_token + 2 * ONE_HEAD * pairs(causal)


def test_experts_with_biases_and_sinks() -> None:
    sparse: dict[str, Any] = {
        **SIZES,
        "num_experts": 4,
        "top_k": 2,
        "expert_intermediate_size": 8,
        "intermediate_size": 8,
    }
    params = GptOssParams(**sparse, sliding_window=3, sliding_layers=(0,))
    per_token = 2 * (PROJECTIONS + HIDDEN * 4 + 2 * 3 * HIDDEN * 8) + HIDDEN * VOCAB
    assert packed(params) == 3 * TOKENS * per_token + ONE_HEAD * (pairs(causal) + pairs(window(3)))


def test_latent_attention_counts_heads_without_padding() -> None:
    params = DeepseekV3Params(
        vocab_size=VOCAB, hidden_size=HIDDEN, num_layers=2, num_heads=HEADS, kv_rank=6, q_rank=10, head_dim=4,
        rotary_dim=2, value_dim=5, intermediate_size=INNER, num_dense_layers=1, num_experts=8, top_k=2,
        expert_intermediate_size=8, num_groups=4, top_groups=2,
    )  # fmt: skip
    latent = HIDDEN * 10 + 10 * HEADS * 6 + HIDDEN * 8 + 6 * HEADS * 9 + HEADS * 5 * HIDDEN
    sparse = HIDDEN * 8 + 3 * HIDDEN * 8 * (2 + 1)  # the router, two experts and a shared one
    per_token = 2 * latent + 3 * HIDDEN * INNER + sparse + HIDDEN * VOCAB
    assert packed(params) == 3 * (TOKENS * per_token + 2 * HEADS * (6 + 5) * pairs(causal))


def test_linear_attention_counts_its_recurrence() -> None:
    params = Qwen3NextParams(
        **SIZES, num_experts=4, top_k=2, expert_intermediate_size=8, shared_intermediate_size=4, full_layers=(1,),
        rotary_dim=2, num_linear_key_heads=2, num_linear_value_heads=4, linear_key_dim=3, linear_value_dim=5,
    )  # fmt: skip
    keys, values = 2 * 3, 4 * 5
    linear = HIDDEN * (2 * keys + 2 * values + 4 + 4) + values * HIDDEN
    convolution, state = 4 * (2 * keys + values), 3 * 4 * 3 * 5
    full = PROJECTIONS + HIDDEN * HEADS * DIM  # with an output gate
    sparse = 2 * (HIDDEN * 4 + 2 * 3 * HIDDEN * 8 + 3 * HIDDEN * 4 + HIDDEN)
    per_token = linear + convolution + state + full + sparse + HIDDEN * VOCAB
    assert packed(params) == 3 * TOKENS * per_token + ONE_HEAD * pairs(causal)


def test_adapters_of_a_frozen_base() -> None:
    model = DecoderForCausalLM(Llama3Params(**SIZES))
    inject(LoRA(r".*\.(q_proj|v_proj)", rank=2), model)
    query, value = HIDDEN * HEADS * DIM, HIDDEN * KEYS * DIM
    adapters = 2 * (HIDDEN + HEADS * DIM) + 2 * (HIDDEN + KEYS * DIM)
    # Forward, the gradients of inputs, and the weight gradients of adapters. Before the first adapter nothing is
    # trained, so the first layer's projections of queries, keys and values, and the factors A, give no input gradients.
    forward = DENSE + 2 * adapters
    inputs = forward - (PROJECTIONS - HEADS * DIM * HIDDEN) - 2 * (HIDDEN + HIDDEN)
    expected = TOKENS * (forward + inputs + 2 * adapters)
    # The first layer's keys need no gradient.
    attention = pairs(causal) * (2 * ONE_HEAD - HEADS * DIM)
    assert query > value
    assert counted(model, NextTokenTask(), OTHER, packed_batch()) == expected + attention


@pytest.mark.parametrize("policy", ["none", "full"])
def test_recomputation_does_not_count_with_and_without_the_engine_of_autograd(policy: CheckpointPolicy) -> None:
    """Autograd's engine may not run in a forked process."""
    sparse: dict[str, Any] = {**SIZES, "num_experts": 4, "top_k": 2, "expert_intermediate_size": 8}
    model = DecoderForCausalLM(Qwen3MoeParams(**sparse))
    checkpoint_layers(model.backbone.layers, policy=policy)
    expected = packed(Qwen3MoeParams(**sparse))
    assert counted(model, NextTokenTask(), OTHER, packed_batch()) == expected
    with mock.patch.object(Tensor, "backward", side_effect=RuntimeError("fork-based multiprocessing")):
        assert counted(model, NextTokenTask(), OTHER, packed_batch()) == expected


def test_frozen_first_layers_have_no_backward_pass() -> None:
    model = DecoderForCausalLM(Llama3Params(**SIZES))
    for name in ("embedding", "layers.0"):
        model.backbone.get_submodule(name).requires_grad_(False)
    layer = PROJECTIONS + 3 * HIDDEN * INNER
    # The norm before the projections of the second layer is trained, so they have gradients of inputs.
    expected = TOKENS * (3 * DENSE - 2 * layer) + pairs(causal) * ONE_HEAD * 4 // 3
    assert counted(model, NextTokenTask(), OTHER, packed_batch()) == expected


@final
class Classify(Task):
    def inputs(self, batch: Any) -> Mapping[str, Any]:
        return {"input": batch}

    def loss(self, outputs: Any, batch: Any) -> Loss:
        return Loss.sum(outputs.square().mean(1), len(batch))


def test_convolutions_of_a_ragged_last_microbatch() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 6, 3, stride=2, groups=2), nn.Flatten(), nn.Linear(54, 5)
    )
    first, second, last = 64 * 4 * 3 * 9, 9 * 6 * 2 * 9, 54 * 5
    images = torch.zeros(4, 3, 8, 8)
    # The images need no gradient.
    expected = (4 + 1) * (2 * first + 3 * second + 3 * last)
    assert counted(model, Classify(), images, images, images[:1]) == expected


@final
class Encoder(nn.Module):
    """Patches of images with torch's encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(12, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 10, batch_first=True, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, 2)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as Sequential
        return self.layers(self.patch(input.unflatten(1, (-1, 12)))).mean(1)


def test_attention_between_the_patches_of_an_image() -> None:
    images = torch.zeros(3, 60)
    layer = 5 * (4 * 8 * 8 + 2 * 8 * 10) + 2 * 8 * 5 * 5
    assert counted(Encoder(), Classify(), images, images[:2]) == 2 * (2 * 5 * 12 * 8 + 3 * 2 * layer)


HF: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "num_key_value_heads": KEYS, "head_dim": DIM, "intermediate_size": INNER, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip
EAGER: dict[str, Any] = {**HF, "attn_implementation": "eager"}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_model_of_transformers_on_padded_rows(implementation: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = HF | {"attn_implementation": implementation}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    rows = [[5], [16], [9]]
    batch = whole_rows(3)
    batch["attention_mask"] = (torch.arange(LENGTH) < torch.tensor(rows)).long()
    expected = 3 * 30 * DENSE + 2 * ONE_HEAD * pairs(causal, rows)
    assert counted(model, NextToken(), whole_rows(2), batch) == expected


def test_sliding_layers_of_a_model_of_transformers() -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention"]
    model = Gemma3ForCausalLM(Gemma3TextConfig(**EAGER, sliding_window=4, layer_types=kinds))
    rows = [[LENGTH]] * 3
    expected = 3 * 3 * LENGTH * DENSE + ONE_HEAD * (pairs(causal, rows) + pairs(window(4), rows))
    assert counted(model, NextToken(), whole_rows(2), whole_rows(3)) == expected


def test_chunked_layers_of_a_model_of_transformers() -> None:
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        **HF, intermediate_size_mlp=INNER, moe_layers=[], attention_chunk_size=5, no_rope_layers=[1, 0],
    )  # fmt: skip
    assert config.layer_types == ["chunked_attention", "full_attention"]
    rows = [[LENGTH]] * 3
    allowed = pairs(causal, rows) + pairs(lambda query, key: key <= query and key // 5 == query // 5, rows)
    expected = 3 * 3 * LENGTH * DENSE + ONE_HEAD * allowed
    assert counted(Llama4ForCausalLM(config), NextToken(), whole_rows(2), whole_rows(3)) == expected


def test_experts_of_a_model_of_transformers() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    model = MixtralForCausalLM(MixtralConfig(**HF, num_local_experts=4, num_experts_per_tok=2))
    per_token = 2 * (PROJECTIONS + HIDDEN * 4 + 2 * 3 * HIDDEN * INNER) + HIDDEN * VOCAB
    expected = 3 * 3 * LENGTH * per_token + 2 * ONE_HEAD * pairs(causal, [[LENGTH]] * 3)
    assert counted(model, NextToken(), whole_rows(2), whole_rows(3)) == expected


LAYOUTS = ("", "dp_shard=2", "tp=2", "cp_shard=2", "pp=2,microbatch=1")
STEPS = 2


@final
class Decoder(ModelProvider):
    def build(self, stage: StageInfo) -> nn.Module:
        return DecoderForCausalLM(Qwen3Params(**SIZES, sliding_window=4, sliding_layers=(1,)), stage)

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        parallelize_decoder(model, ctx)


def job_rows() -> list[dict[str, Tensor]]:
    batch = packed_batch([*PACKED, [3, 3]])
    return [{name: values[row] for name, values in batch.items()} for row in range(4)]


def reported(layout: str, folder: Path) -> None:
    """Run a job whose laps take two seconds each."""
    parsed, off = parse_layout(layout), {"enabled": False}
    values = {
        "steps": STEPS,
        "batch": {"global_size": 4, "microbatch_size": parsed.microbatch_size},
        "mesh": parsed.mesh,
        "pipeline": {"schedule": parsed.schedule, "draw": False},
        "run": {"folder": folder},
        "logging": {"progress": False, "every": 1, "peak_flops": 1e6},
        "resilience": {"health": off, "watchdog": off},
        "export": False,
    }
    config = TrainerConfig.model_validate(values)
    with mock.patch("d9d_loop.job.reports._Clock.lap", return_value=(torch.zeros(()), 2.0)):
        Trainer(config, model=Decoder(), data=job_rows(), task=NextTokenTask()).train()


def reported_all(jobs: list[tuple[str, Path]]) -> None:
    with MeshConfig(data_parallel_shard=-1).build():
        for layout, folder in jobs:
            reported(layout, folder)


@pytest.mark.slow
def test_a_job_reports_the_same_flops_in_each_layout(tmp_path: Path) -> None:
    folders = {layout: tmp_path / str(number) for number, layout in enumerate(LAYOUTS)}
    reported("", folders[""])
    run_ranks(reported_all, [job for job in folders.items() if job[0]], world_size=2, timeout=300)
    rows = [*PACKED, [3, 3]]
    expected = 3 * sum(map(sum, rows)) * DENSE + ONE_HEAD * (pairs(causal, rows) + pairs(window(4), rows))
    for layout, folder in folders.items():
        lines = [line for line in read_metrics(next(folder.rglob("metrics.jsonl"))) if "loss" in line]
        num_ranks = 2 if layout else 1
        assert [line["flops_per_second"] for line in lines] == [pytest.approx(2 * expected / 2)] * STEPS, layout
        assert [line["mfu"] for line in lines] == [pytest.approx(expected / 1e6 / num_ranks)] * STEPS, layout
