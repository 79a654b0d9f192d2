from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from d9d_dist import ContextSplit, MeshConfig, UserError, materialize, sync_gradients
from d9d_dist.testing import assert_trees_close, full_gradients, run_ranks
from d9d_modules import (
    DecoderForCausalLM,
    DecoderForClassification,
    DecoderLayer,
    DynamicNtkScaling,
    Llama3Params,
    Llama3Scaling,
    LongRopeScaling,
    Qwen3Params,
    parallelize_decoder,
)

SIZES: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 12,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
    "intermediate_size": 20,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
}
QWEN3 = Qwen3Params(**SIZES, sliding_window=3, sliding_layers=(1,))
LLAMA3 = Llama3Params(
    **SIZES,
    rope_scaling=Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=4),
)
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 3, [0] * 8])


def _train(params: Qwen3Params | Llama3Params, degrees: dict[str, int], options: dict[str, Any]) -> dict[str, Tensor]:
    """Return the gradients of one step over packed rows, as full tensors."""
    with MeshConfig(**degrees).build() as ctx:
        with torch.device("meta"):
            model = DecoderForCausalLM(params).double()
        parallelize_decoder(model, ctx, **options)
        materialize(model, device=ctx.device, seed=0)
        input_ids, labels = torch.randint(0, 16, (2, 2, 8), generator=torch.Generator().manual_seed(0))
        batch = {"input_ids": input_ids, "labels": labels, "document_ids_BL": DOCUMENTS}
        split = ContextSplit(ctx.mesh_for("batch")["cp"])
        part = split.split(batch) if ctx.size("batch", "cp") > 1 else batch
        if degrees.get("data_parallel_shard") == 2:
            part = {name: each[ctx.rank : ctx.rank + 1] for name, each in batch.items()}
        hidden = part.pop("input_ids")
        model(hidden, position_ids=split.positions(8), **part).sum().backward()
        sync_gradients(model)
        return full_gradients(model)


@pytest.mark.parametrize("params", [QWEN3, LLAMA3], ids=["qwen3", "llama3"])
@pytest.mark.sample("qwen3")
def test_layouts_give_the_gradients_of_one_process(params: Qwen3Params | Llama3Params) -> None:
    (expected,) = run_ranks(_train, params, {}, {}, world_size=1)
    layouts: list[tuple[dict[str, int], dict[str, Any]]] = [
        ({"tensor_parallel": 2, "context_parallel_shard": 2}, {"checkpointing": "selective"}),
        ({"tensor_parallel": 2}, {}),
        ({"context_parallel_replicate": 2}, {"context_method": "all_to_all"}),
        ({"data_parallel_shard": 2}, {"checkpointing": "full"}),
    ]
    for degrees, options in layouts:
        for gradients in run_ranks(_train, params, degrees, options, world_size=prod(degrees.values())):
            assert_trees_close(gradients, expected, rtol=1e-11)


@pytest.mark.slow
def test_each_block_is_compiled_if_enabled() -> None:
    (compiled,) = run_ranks(_compiled, world_size=1)
    assert compiled == [False, False, True, True]


def _compiled() -> list[bool]:
    found: list[bool] = []
    with MeshConfig().build() as ctx:
        for compile_blocks in (False, True):
            model = DecoderForCausalLM(QWEN3)
            parallelize_decoder(model, ctx, compile_blocks=compile_blocks)
            layers = [layer for layer in model.layers.values() if isinstance(layer, DecoderLayer)]
            found += [layer._compiled_call_impl is not None for layer in layers]
    return found


def _train_with_async_tensor_parallelism() -> tuple[dict[str, Tensor], Counter[str]]:
    """Return the gradients of one step, and the number of calls of torch's fused operators.

    The CPU has no fused kernels: torch's decompositions into collectives and products compute them.
    """
    calls: Counter[str] = Counter()
    library = torch.library.Library("symm_mem", "IMPL")
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):

        def fused(*args: Any, name: str = name, **kwargs: Any) -> Any:
            calls[name] += 1
            return getattr(symmetric_memory, f"_{name}_fallback")(*args, **kwargs)

        library.impl(name, fused, "CPU")
    options = {"compile_blocks": True, "async_tensor_parallel": True}
    with mock.patch("d9d_modules.compiling.enable_symmetric_memory"), symmetric_memory._test_mode():
        return _train(QWEN3, {"tensor_parallel": 2}, options), calls


@pytest.mark.full
def test_async_tensor_parallelism_gives_the_gradients_of_one_process() -> None:
    """Two all-gathers and reduce-scatters of each layer are fused in forward, and two all-gathers in backward."""
    (expected,) = run_ranks(_train, QWEN3, {}, {}, world_size=1)
    for gradients, calls in run_ranks(_train_with_async_tensor_parallelism, world_size=2, timeout=300):
        assert calls == {"fused_all_gather_matmul": 2 * (2 + 2), "fused_matmul_reduce_scatter": 2 * 2}
        assert_trees_close(gradients, expected, rtol=1e-11)


def _parallelize_async(options: dict[str, Any]) -> str:
    with MeshConfig(tensor_parallel=2).build() as ctx, pytest.raises(UserError) as error:
        parallelize_decoder(DecoderForCausalLM(QWEN3), ctx, async_tensor_parallel=True, **options)
    return str(error.value)


def test_async_tensor_parallelism_is_refused_without_compilation_and_without_cuda() -> None:
    for message in run_ranks(_parallelize_async, {}, world_size=2):
        assert message.startswith("async_tensor_parallel needs compiled layers; got compile_blocks = False.")
    for message in run_ranks(_parallelize_async, {"compile_blocks": True}, world_size=2):
        assert "torch does not support for devices of the type cpu. Expected devices connected by NVLink." in message


def test_every_second_block_is_checkpointed_if_enabled() -> None:
    (checkpointed,) = run_ranks(_checkpointed, world_size=1)
    assert checkpointed == [True, False]


def _checkpointed() -> list[bool]:
    """Return for each block whether its backward pass recomputes it."""
    with MeshConfig().build() as ctx:
        model = DecoderForCausalLM(QWEN3)
        parallelize_decoder(model, ctx, checkpointing="full", checkpoint_every=2)
        calls = dict.fromkeys(model.layers, 0)
        for name, layer in model.layers.items():
            assert isinstance(layer, DecoderLayer)
            layer.attention.register_forward_hook(lambda *_, name=name: calls.update({name: calls[name] + 1}))
        model(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
        return [count == 2 for count in calls.values()]


def _pooled() -> str:
    with MeshConfig(context_parallel_shard=2).build() as ctx:
        model = DecoderForClassification(QWEN3, num_classes=2)
        try:
            parallelize_decoder(model, ctx)
        except UserError as error:
            return str(error)
    return "parallelized"


def test_pooled_heads_reject_context_parallelism() -> None:
    message = (
        "head, a ClassificationHead, pools whole sequences, but 2 context-parallel ranks shard each sequence; expected "
        "one context-parallel rank. Set the degree to 1, or shard the model on another axis."
    )
    assert run_ranks(_pooled, world_size=2) == [message] * 2


LONG = LongRopeScaling(short_factors=(1.0,) * 3, long_factors=(2.0, 3.0, 4.0), factor=4.0, original_max_positions=4)


def _apply_context_parallelism(params: Llama3Params) -> None:
    with MeshConfig(context_parallel_shard=2).build() as ctx:
        with torch.device("meta"):
            model = DecoderForCausalLM(params)
        parallelize_decoder(model, ctx)


def _rejects_context_parallelism(params: Llama3Params) -> None:
    with pytest.raises(
        UserError, match=r"backbone, a DecoderModel, scales rotary positions by the longest row of a batch "
    ):
        _apply_context_parallelism(params)


@pytest.mark.parametrize(
    "scaling", [LONG, DynamicNtkScaling(factor=4.0, original_max_positions=4)], ids=["long", "ntk"]
)
def test_a_length_dependent_scaling_requires_rope_length(scaling: LongRopeScaling | DynamicNtkScaling) -> None:
    run_ranks(_rejects_context_parallelism, Llama3Params(**SIZES, rope_scaling=scaling))
    fixed = Llama3Params(**SIZES, rope_scaling=scaling, rope_length=8)
    alone, *_ = run_ranks(_train, fixed, {}, {}, world_size=1)
    for gradients in run_ranks(_train, fixed, {"context_parallel_shard": 2}, {}):
        assert_trees_close(gradients, alone)


def _gathered_units(tied: bool) -> list[list[str]]:
    """Return the parameters that FSDP gathers together."""
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        with torch.device("meta"):
            model = DecoderForCausalLM(replace(LLAMA3, tie_word_embeddings=tied))
        parallelize_decoder(model, ctx)
        units = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
        inner = {name: sorted(below for below in units if below != name and below.startswith(name)) for name in units}
        return [
            [
                name
                for name, _ in model.named_parameters()
                if name.startswith(unit) and not name.startswith(tuple(below))
            ]
            for unit, below in inner.items()
            if "layers" not in unit
        ]


def test_embedding_and_head_are_gathered_separately_unless_tied() -> None:
    (apart, _), (tied, _) = (run_ranks(_gathered_units, flag) for flag in (False, True))
    assert apart == [["backbone.norm.weight"], ["backbone.embedding.weight"], ["lm_head.weight"]]
    assert tied == [["backbone.embedding.weight", "backbone.norm.weight"]]
