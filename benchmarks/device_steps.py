"""Slices of `device_day.py` that train: steps against a plain torch baseline, agreement, checkpoints, a trace.

    python benchmarks/device_steps.py step 8B --output step.json
    python benchmarks/device_steps.py step 8B --device cpu --tiny

A step is forward, backward, clipping and AdamW on one packed row of random tokens, in bfloat16 with float32 parameters.
The baseline is written with torch alone: FSDP2 with mixed precision, each block compiled, fused AdamW, SDPA, and the
loss of all logits at once. Both run in the same process, one after the other. MFU counts model FLOPs (`d9d_metrics`).
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from d9d_dist import DistributedContext, Launch, MeshConfig, Precision, clip_grad_norm_, materialize
from d9d_metrics import peak_flops, transformer_flops_per_token
from d9d_modules import DecoderForCausalLM, Qwen3Params, parallelize_decoder
from d9d_moe import Qwen3MoeParams, parallelize_moe
from d9d_state import CheckpointStore, model_tensors, optimizer_tensors, prepare_optimizer_for_load

VOCABULARY, HEAD = 151_936, 128
MIXED = Precision(compute=torch.bfloat16, reduce=torch.float32, cast_inputs=False)


@dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes of a Qwen3 model, cut to layers whose float32 parameters and AdamW states fit into 80 GB."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    tied: bool = False
    experts: int = 0
    top_k: int = 0
    whole: int
    """Number of layers of the released model."""
    vocabulary: int = VOCABULARY
    head: int = HEAD
    tokens: int = 8192


MODELS = {
    "0.6B": Model(layers=28, whole=28, hidden=1024, heads=16, kv_heads=8, intermediate=3072, tied=True),
    "1.7B": Model(layers=28, whole=28, hidden=2048, heads=16, kv_heads=8, intermediate=6144, tied=True),
    "4B": Model(layers=30, whole=36, hidden=2560, heads=32, kv_heads=8, intermediate=9728, tied=True),
    "8B": Model(layers=12, whole=36, hidden=4096, heads=32, kv_heads=8, intermediate=12288),
    "30B-A3B": Model(layers=4, whole=48, hidden=2048, heads=32, kv_heads=4, intermediate=768, experts=128, top_k=8),
}


def _tiny(model: Model) -> Model:
    small = replace(model, layers=2, hidden=32, heads=4, kv_heads=2, intermediate=24, vocabulary=64, head=8, tokens=32)
    return replace(small, experts=4, top_k=2) if model.experts else small


def _d9d(model: Model) -> nn.Module:
    shape: dict[str, Any] = {
        "vocab_size": model.vocabulary,
        "hidden_size": model.hidden,
        "num_layers": model.layers,
        "num_heads": model.heads,
        "num_kv_heads": model.kv_heads,
        "head_dim": model.head,
        "intermediate_size": model.intermediate,
        "tie_word_embeddings": model.tied,
        "max_position_embeddings": 40_960,
    }
    if model.experts:
        experts = {"num_experts": model.experts, "top_k": model.top_k, "expert_intermediate_size": model.intermediate}
        return DecoderForCausalLM(Qwen3MoeParams(**shape, **experts))
    return DecoderForCausalLM(Qwen3Params(**shape))


class _PlainBlock(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model, width = model, model.heads * model.head
        self.norms = nn.ModuleList(nn.RMSNorm(model.hidden, eps=1e-6) for _ in range(2))
        self.head_norms = nn.ModuleList(nn.RMSNorm(model.head, eps=1e-6) for _ in range(2))
        self.query = nn.Linear(model.hidden, width, bias=False)
        self.key_value = nn.Linear(model.hidden, 2 * model.kv_heads * model.head, bias=False)
        self.out = nn.Linear(width, model.hidden, bias=False)
        self.gate_up = nn.Linear(model.hidden, 2 * model.intermediate, bias=False)
        self.down = nn.Linear(model.intermediate, model.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        normed = self.norms[0](x)
        query = self.query(normed).view(batch, length, self.model.heads, self.model.head)
        key, value = self.key_value(normed).view(batch, length, 2, self.model.kv_heads, self.model.head).unbind(2)
        query, key = (
            _rotate(norm(each), cos, sin).transpose(1, 2)
            for norm, each in zip(self.head_norms, (query, key), strict=True)
        )
        attended = F.scaled_dot_product_attention(
            query, key, value.transpose(1, 2), is_causal=True, enable_gqa=self.model.heads != self.model.kv_heads
        )
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class _PlainDecoder(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.embedding = nn.Embedding(model.vocabulary, model.hidden)
        self.blocks = nn.ModuleList(_PlainBlock(model) for _ in range(model.layers))
        self.norm = nn.RMSNorm(model.hidden, eps=1e-6)
        self.head = nn.Linear(model.hidden, model.vocabulary, bias=False)
        if model.tied:
            self.head.weight = self.embedding.weight
        self.size = model.head

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        angles = positions[:, None] / 1e6 ** (torch.arange(0, self.size, 2, device=ids.device) / self.size)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), labels.flatten(), reduction="sum")


def _build_d9d(model: Model, ctx: DistributedContext, *, compile_blocks: bool) -> nn.Module:
    with torch.device("meta"):
        built = _d9d(model)
    experts = parallelize_moe if model.experts else None
    parallelize_decoder(built, ctx, precision=MIXED, compile_blocks=compile_blocks, experts=experts)
    materialize(built, device=ctx.device, seed=0)
    return _Summed(built)


class _Summed(nn.Module):
    """Decoder of d9d whose forward returns the sum of the losses."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return self.model(ids, position_ids=positions, labels=labels).sum()


def _build_plain(model: Model, ctx: DistributedContext, *, compile_blocks: bool) -> nn.Module:
    with ctx.device:
        built = _PlainDecoder(model)
    mesh = ctx.mesh_for("dense")["dp_cp_shard"]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in built.blocks:
        if compile_blocks:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(built, mesh=mesh, mp_policy=policy)
    return built


def _measure(model: Model, build: Callable[..., Any], ctx: DistributedContext, *, steps: int) -> dict[str, Any]:
    """Return the median seconds of a step after three warm-up steps, and the peak memory."""
    is_host = ctx.device.type == "cpu"
    if not is_host:
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
    module = build(model, ctx, compile_blocks=not is_host)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=not is_host)
    draws = torch.Generator().manual_seed(0)
    ids = torch.randint(model.vocabulary, (1, model.tokens + 1), generator=draws).to(ctx.device)
    seconds, losses = [], []
    for _ in range(steps + 3):
        _wait(ctx)
        began = time.perf_counter()
        loss = module(ids[:, :-1], ids[:, 1:]) / model.tokens
        loss.backward()
        clip_grad_norm_(module.parameters(), 1.0, ctx=ctx)
        optimizer.step()
        optimizer.zero_grad()
        _wait(ctx)
        seconds.append(time.perf_counter() - began)
        losses.append(loss.item())
    memory = None if is_host else torch.accelerator.max_memory_allocated() / 2**30
    return {"seconds": statistics.median(seconds[3:]), "GiB": memory, "first loss": losses[0], "last loss": losses[-1]}


def _wait(ctx: DistributedContext) -> None:
    if ctx.device.type != "cpu":
        torch.accelerator.synchronize()


def _flops(model: Model) -> float:
    """Return the model FLOPs of a step."""
    attention = model.hidden * model.head * (2 * model.heads + 2 * model.kv_heads)
    active = model.top_k or 1
    block = attention + 3 * model.hidden * model.intermediate * active + model.hidden * model.experts
    return model.tokens * transformer_flops_per_token(
        num_matmul_parameters=model.layers * block + model.hidden * model.vocabulary,
        num_layers=model.layers,
        num_heads=model.heads,
        head_dim=model.head,
        sequence_length=model.tokens,
    )


def step(name: str, model: Model, ctx: DistributedContext, *, steps: int) -> list[dict[str, Any]]:
    """Measure d9d and, for dense models, the baseline."""
    peers: dict[str, Callable[..., Any]] = {"d9d": _build_d9d}
    if not model.experts:
        peers["torch alone"] = _build_plain
    rows = []
    for peer, build in peers.items():
        found = _measure(model, build, ctx, steps=steps)
        rate = None if ctx.device.type == "cpu" else _flops(model) / found["seconds"] / peak_flops(ctx.device)
        rows.append(
            {
                "model": name,
                "layers": f"{model.layers} of {model.whole}",
                "peer": peer,
                "tokens": model.tokens,
                "tokens per second": model.tokens / found["seconds"],
                "MFU": rate,
                **found,
            }
        )
    return rows


def environment(ctx: DistributedContext) -> dict[str, Any]:
    """Describe the machine, with the measured rate of a large product and the bandwidth of a large copy."""
    found: dict[str, Any] = {"torch": torch.__version__, "device": str(ctx.device)}
    if ctx.device.type != "cpu":
        found["name"] = torch.get_device_module(ctx.device).get_device_name(ctx.device)
    side = 256 if ctx.device.type == "cpu" else 8192
    x = torch.randn(side, side, device=ctx.device, dtype=torch.bfloat16)
    found["product, TFLOP/s"] = 2 * side**3 / _seconds(lambda: x @ x, ctx) / 1e12
    y = torch.empty(side, 16 * side, device=ctx.device, dtype=torch.bfloat16)
    found["copy, GB/s"] = 2 * y.nbytes / _seconds(y.clone, ctx) / 1e9
    return found


def _seconds(call: Callable[[], Any], ctx: DistributedContext) -> float:
    for _ in range(3):
        call()
    _wait(ctx)
    began = time.perf_counter()
    for _ in range(20):
        call()
    _wait(ctx)
    return (time.perf_counter() - began) / 20


def agreement(ctx: DistributedContext) -> list[dict[str, Any]]:
    """Compare loss and gradients on the device with float64 on the CPU, for a dense and a sparse small model."""
    rows = []
    for name in ("8B", "30B-A3B"):
        model = _tiny(MODELS[name])
        ids = torch.randint(model.vocabulary, (2, model.tokens + 1), generator=torch.Generator().manual_seed(1))
        exact = _gradients(model, ids, torch.device("cpu"), torch.float64)
        for dtype in (torch.float32, torch.bfloat16):
            found = _gradients(model, ids, ctx.device, dtype)
            error = max(((found[key] - exact[key]).norm() / exact[key].norm()).item() for key in exact)
            rows.append({"model": name, "dtype": str(dtype), "largest relative error of a gradient": error})
    return rows


def _gradients(model: Model, ids: Tensor, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    with torch.device("meta"):
        built = _Summed(_d9d(model).double())
    materialize(built, device=torch.device("cpu"), seed=0)
    built = built.to(device=device, dtype=dtype)
    ids = ids.to(device)
    loss = built(ids[:, :-1], ids[:, 1:]) / ids.numel()
    loss.backward()
    found = {name: parameter.grad for name, parameter in built.named_parameters()}
    return {"loss": loss.detach().double().cpu(), **{n: g.double().cpu() for n, g in found.items() if g is not None}}


def checkpoint(model: Model, ctx: DistributedContext) -> dict[str, Any]:
    """Measure a save and a load, and check that training goes on with the same bits."""
    draws = torch.Generator().manual_seed(0)
    ids = torch.randint(model.vocabulary, (1, model.tokens + 1), generator=draws).to(ctx.device)

    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        module = _build_d9d(model, ctx, compile_blocks=False)
        return module, torch.optim.AdamW(module.parameters(), lr=1e-3)

    def train(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for _ in range(2):
            loss = module(ids[:, :-1], ids[:, 1:]) / model.tokens
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    with tempfile.TemporaryDirectory() as folder, CheckpointStore(Path(folder)) as store:
        module, optimizer = start()
        train(module, optimizer)
        began = time.perf_counter()
        store.save(2, {**model_tensors(module), **optimizer_tensors(module, optimizer)}, ctx=ctx)
        saved = time.perf_counter() - began
        expected = train(module, optimizer)
        module, optimizer = start()
        began = time.perf_counter()
        info = store.newest(ctx)
        if info is None:
            raise RuntimeError("the checkpoint that was saved is not complete")
        prepare_optimizer_for_load(module, optimizer, info)
        store.load(info, {**model_tensors(module), **optimizer_tensors(module, optimizer)}, ctx)
        loaded = time.perf_counter() - began
        found = train(module, optimizer)
    size = sum(parameter.nbytes for parameter in module.parameters()) * 3 / 2**30
    return {"GiB": size, "save, s": saved, "load, s": loaded, "same bits": found == expected}


def profile(model: Model, ctx: DistributedContext, folder: Path) -> dict[str, Any]:
    """Keep a trace of two steps."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if ctx.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    trace = folder / "trace.json.gz"
    with torch.profiler.profile(activities=activities) as profiler:
        _measure(model, _build_d9d, ctx, steps=2)
    profiler.export_chrome_trace(str(trace))
    rows = sorted(profiler.key_averages(), key=lambda row: -row.self_device_time_total)[:20]
    return {"trace": trace.name, "kernels, ms": {row.key: row.self_device_time_total / 1000 for row in rows}}


def main() -> None:
    """Run one slice and write its result."""
    parser = argparse.ArgumentParser(description="Slices that train, of device_day.py.")
    parser.add_argument("slice", choices=["environment", "agreement", "step", "checkpoint", "profile"])
    parser.add_argument("model", nargs="?", choices=list(MODELS), default="1.7B")
    parser.add_argument("--device", help="by default the accelerator")
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that it runs")
    parser.add_argument("--output", type=Path, default=Path("device_steps.json"), help="JSON file to write")
    options = parser.parse_args()
    model = _tiny(MODELS[options.model]) if options.tiny else MODELS[options.model]
    launch = None if options.device is None else Launch(device=options.device)
    with MeshConfig().build(launch=launch) as ctx:
        slices: dict[str, Callable[[], Any]] = {
            "environment": partial(environment, ctx),
            "agreement": partial(agreement, ctx),
            "step": partial(step, options.model, model, ctx, steps=2 if options.tiny else 10),
            "checkpoint": partial(checkpoint, model, ctx),
            "profile": partial(profile, model, ctx, options.output.parent),
        }
        found = slices[options.slice]()
    options.output.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
