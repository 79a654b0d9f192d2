"""Predicted and measured step times of small decoders on this machine's CPU, with constants of `d9d-plan --calibrate`.

    python planning_calibration.py

Prints JSON. Layouts have one rank, or two ranks with replicated or sharded (FSDP2) parameters over gloo. Each rank has
one thread. Tensor and pipeline parallelism are not compared.
"""

import json
import sys
import time
from itertools import product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from d9d_dist.testing import run_ranks
from d9d_loop.planning import DecoderShape, Hardware, PlanLayout, step_time
from d9d_loop.planning.calibration import calibrate

VOCAB = 2048
SIZES = ((128, 4, 64, 1), (128, 8, 256, 2), (256, 4, 256, 2), (256, 8, 128, 4), (512, 4, 256, 2))
"""Hidden size, layers, tokens of a sample, and samples of a microbatch."""
KINDS = ("one rank", "two microbatches", "replicated", "parameters")


class Layer(nn.Module):
    """Layer of a GPT."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(size), nn.LayerNorm(size)
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer."""
        q, k, v = (each.unflatten(-1, (-1, 64)).transpose(1, 2) for each in self.qkv(self.first(x)).chunk(3, dim=-1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Decoder(nn.Module):
    """GPT with tied embeddings, without positions."""

    def __init__(self, size: int, num_layers: int) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(VOCAB, size), nn.ModuleList(Layer(size) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def reduce_gradients(gradients: list[Tensor]) -> None:
    """All-reduce the gradients in one bucket, as d9d does below its bucket size."""
    bucket = torch.cat([each.flatten() for each in gradients])
    dist.all_reduce(bucket)
    for each, reduced in zip(gradients, bucket.split([each.numel() for each in gradients]), strict=True):
        each.copy_(reduced.view_as(each))


def measure(size: int, num_layers: int, length: int, batch: int, kind: str) -> float:
    """Return the shortest of ten step times of this rank; other processes of the machine lengthen the other steps."""
    torch.set_num_threads(1)
    model = Decoder(size, num_layers)
    world_size = 1
    if kind in ("replicated", "parameters"):
        dist.init_process_group("gloo")
        world_size = dist.get_world_size()
    if kind == "parameters":
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, foreach=True)
    tokens = torch.randint(VOCAB, (batch, length + 1))
    seconds = []
    for _ in range(12):
        if world_size > 1:
            dist.barrier()
        start = time.perf_counter()
        for _ in range(2 if kind == "two microbatches" else 1):
            logits = model(tokens[:, :-1])
            functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        if kind == "replicated":
            reduce_gradients([each.grad for each in parameters if each.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    return min(seconds[2:])


def predict(hardware: Hardware, sizes: tuple[int, int, int, int], kind: str) -> float:
    """Return the predicted time of the step."""
    size, num_layers, length, batch = sizes
    shape = DecoderShape.gpt(
        hidden_size=size, num_layers=num_layers, num_heads=size // 64, vocab_size=VOCAB, length=length
    )
    layout = PlanLayout(
        dp=1 if kind in ("one rank", "two microbatches") else 2,
        microbatch_size=batch,
        num_microbatches=2 if kind == "two microbatches" else 1,
        length=length,
        sharding="parameters" if kind == "parameters" else "replicated",
        weight_bytes=4,
        reduces_each_microbatch=True,
    )
    return step_time(shape, layout, hardware).total


def main() -> None:
    """Calibrate, measure, predict and print."""
    with TemporaryDirectory() as folder:
        hardware = Hardware.load(str(calibrate(Path(folder, "mine.toml"))))
    rows, errors = [], []
    for sizes, kind in product(SIZES, KINDS):
        ranks = 2 if kind in ("replicated", "parameters") else 1
        measured = max(run_ranks(measure, *sizes, kind, world_size=ranks))
        predicted = predict(hardware, sizes, kind)
        errors.append(predicted / measured - 1)
        print(sizes, kind, measured, predicted, file=sys.stderr)
        rows.append({"layout": [*sizes, kind], "measured": measured, "predicted": predicted})
    figures = {
        "mape": 100 * fmean(map(abs, errors)),
        "bias": 100 * fmean(errors),
        "covered": 100 * fmean([abs(each) <= hardware.dense_error for each in errors]),
    }
    result = {"hardware": hardware.model_dump(), "rows": rows, **figures}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
