"""Host memory and time of a start from a Hugging Face folder, on local ranks, compared with `from_pretrained`.

    python packages/d9d-loop/benchmarks/hugging_face_memory.py

Prints JSON. Each way runs in new processes, first with a tiny model, so that imports are excluded. A peak is the
resident memory of one process (VmHWM) above its value before the model, in bytes: "loaded" after the weights are
loaded, "forward" after a forward pass of a few tokens. `from_pretrained` memory-maps its file: a page counts only after
it was read.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from d9d_dist.testing import RankPool
from d9d_loop import Inference, InferenceConfig, InferenceTask, ModelReady, hugging_face_model, validate_config

_SECONDS = 1200.0
"""Timeout of one way."""


class _Means(InferenceTask):
    def inputs(self, batch: torch.Tensor) -> Any:
        return {"input_ids": batch}

    def results(self, outputs: Any, batch: torch.Tensor) -> list[Any]:
        return outputs.logits.float().mean((1, 2)).tolist()


def main() -> None:
    """Measure, print JSON, and optionally write it."""
    parser = argparse.ArgumentParser(description="Memory of a start from a Hugging Face folder.")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folder, tiny = f"{root}/model", f"{root}/tiny"
        _in_new_processes(_write_model, folder, args.layers, args.hidden, args.vocabulary, ranks=1)
        _in_new_processes(_write_model, tiny, 1, 64, 8000, ranks=1)
        result = {
            "checkpoint_bytes": sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")),
            "block_bytes": 4 * sum(parameter.numel() for parameter in _structure(folder).model.layers[0].parameters()),
            "ranks": args.ranks,
            "hugging_face_model": _in_new_processes(_infer, folder, tiny, hugging_face_model, ranks=args.ranks),
            "function_with_from_pretrained": _in_new_processes(_infer, folder, tiny, _function, ranks=args.ranks),
            "from_pretrained": _in_new_processes(_from_pretrained, folder, tiny, ranks=1),
        }
    text = json.dumps(result, indent=2)
    print(text)
    if args.output:
        args.output.write_text(text + "\n", encoding="utf-8")


def _in_new_processes(function: Callable[..., Any], *args: Any, ranks: int) -> list[Any]:
    with RankPool() as pool:
        return pool.run(function, *args, world_size=ranks, timeout=_SECONDS)


def _structure(folder: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def _write_model(folder: str, layers: int, hidden: int, vocabulary: int) -> None:
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_attention_heads=hidden // 64,
        vocab_size=vocabulary,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def _function(folder: str) -> Callable[[Any], Any]:
    return lambda _stage: AutoModelForCausalLM.from_pretrained(folder)


def _infer(folder: str, tiny: str, make: Callable[[str], Any]) -> dict[str, float]:
    _infer_once(tiny, make(tiny))
    return _infer_once(folder, make(folder))


def _infer_once(folder: str, model: Any) -> dict[str, float]:
    measured = _Peak()
    run = {"folder": f"{folder}-runs", "name": type(model).__name__}
    values = {"run": run, "batch_size": 1, "mesh": {"data_parallel_shard": -1}, "logging": {"progress": False}}
    inference = Inference(
        validate_config(InferenceConfig, values), model=model, data=[torch.arange(8)] * 4, task=_Means()
    )
    inference.events.on(ModelReady, lambda _ready: measured.mark("loaded"))
    inference.run()
    measured.mark("forward")
    return measured.values


def _from_pretrained(folder: str, tiny: str) -> dict[str, float]:
    for each in (tiny, folder):
        measured = _Peak()
        model = AutoModelForCausalLM.from_pretrained(each)
        measured.mark("loaded")
        with torch.no_grad():
            model(input_ids=torch.arange(8)[None])
        measured.mark("forward")
    return measured.values


class _Peak:
    """Peaks of this process's resident memory since construction, and times."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the current resident memory
        self._before, self._start = _peak_bytes(), time.perf_counter()
        self.values: dict[str, float] = {}

    def mark(self, name: str) -> None:
        """Record the peak since construction."""
        self.values[f"{name}_peak_bytes"] = _peak_bytes() - self._before
        self.values[f"{name}_seconds"] = time.perf_counter() - self._start


def _peak_bytes() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
