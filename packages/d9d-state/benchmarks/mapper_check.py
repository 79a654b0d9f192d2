"""Benchmark of building, checking and inverting a large state mapper: seconds, and microseconds per tensor.

    uv run python packages/d9d-state/benchmarks/mapper_check.py --tensors 100000 --folder

Prints one JSON line for each graph. "mixed" is a decoder of many layers whose graph stacks experts, concatenates
projections, transposes, casts and renames; "renames" has one group per tensor, the maximum. No tensor data is read;
`--folder` also checks against the headers of safetensors files with tiny tensors and an index. The goal is that
building and checking together take at most 2 s for 100,000 tensors.
"""

import argparse
import gc
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from d9d_state import (
    StateMapper,
    TensorInfo,
    cast,
    concat,
    parallel,
    rename,
    repeat,
    scope,
    sequential,
    stack,
    transpose,
)

_EXPERTS = 8
_TENSORS_PER_LAYER = 7 + 3 * _EXPERTS
_FILES = 8
_Tensors = dict[str, TensorInfo]


def main() -> None:
    """Measure every graph and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tensors", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", action="store_true", help="also check against the headers of real files")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    torch.set_num_threads(1)
    builders: dict[str, tuple[Callable[[int], StateMapper], Callable[[int], _Tensors]]] = {
        "mixed": (_mixed, _mixed_source),
        "renames": (_renames, _renames_source),
    }
    results = []
    for name, (build, make_source) in builders.items():
        results.append({"graph": name, **_measure(build, make_source, args.tensors, args.repeats, files=args.folder)})
        print(json.dumps(results[-1]), flush=True)
    if args.output:
        args.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def _measure(
    build: Callable[[int], StateMapper],
    make_source: Callable[[int], _Tensors],
    num_tensors: int,
    repeats: int,
    *,
    files: bool,
) -> dict[str, Any]:
    source = make_source(num_tensors)
    mapper = build(num_tensors)
    target = _target(mapper, source)
    seconds: dict[str, list[float]] = {}
    with _folder_of(source, wanted=files) as folder:
        for _ in range(repeats):
            # A mapper caches its groups, so every measurement needs a new one.
            mapper = _timed(seconds, "build", lambda: build(num_tensors))
            _timed(seconds, "check", lambda mapper=mapper: mapper.check(source=source, target=target))
            _timed(seconds, "inverse", mapper.inverse)
            mapper = build(num_tensors)
            if folder is not None:
                _timed(seconds, "check_folder", lambda mapper=mapper: mapper.check(source=folder, target=target))
    medians = {f"{name}_s": round(statistics.median(each), 3) for name, each in seconds.items()}
    total = statistics.median(a + b for a, b in zip(seconds["build"], seconds["check"], strict=True))
    return {
        "tensors": len(source),
        "groups": len(mapper.groups),
        **medians,
        "build_and_check_s": round(total, 3),
        "build_and_check_us_per_tensor": round(1e6 * total / len(source), 2),
        "goal_s": round(2.0 * len(source) / 100_000, 3),
    }


def _timed(seconds: dict[str, list[float]], name: str, work: Callable[[], StateMapper]) -> StateMapper:
    gc.collect()
    start = time.perf_counter()
    result = work()
    seconds.setdefault(name, []).append(time.perf_counter() - start)
    return result


def _target(mapper: StateMapper, source: _Tensors) -> _Tensors:
    target: _Tensors = {}
    for group in mapper.groups:
        target.update(mapper.infer({name: source[name] for name in group.inputs}))
    return target


def _layers(num_tensors: int) -> range:
    return range(math.ceil(num_tensors / _TENSORS_PER_LAYER))


def _mixed(num_tensors: int) -> StateMapper:
    experts = [
        sequential(
            stack([f"mlp.experts.{expert}.{name}.weight" for expert in range(_EXPERTS)], name),
            transpose(name, f"experts.{name}", dim0=1, dim1=2),
        )
        for name in ("gate_proj", "up_proj", "down_proj")
    ]
    layer = parallel(
        concat([f"self_attn.{name}_proj.weight" for name in "qkv"], "attention.qkv", sizes=[4, 2, 2]),
        transpose("self_attn.o_proj.weight", "attention.out"),
        rename("input_layernorm.weight", "attention_norm.weight"),
        rename("post_attention_layernorm.weight", "feed_forward_norm.weight"),
        cast("mlp.gate.weight", dtype=torch.float32, back=torch.bfloat16),
        *experts,
    )
    return repeat(scope("model.layers.{i}.", "layers.{i}.", layer), i=_layers(num_tensors))


def _mixed_source(num_tensors: int) -> _Tensors:
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (4, 4),
        "self_attn.k_proj.weight": (2, 4),
        "self_attn.v_proj.weight": (2, 4),
        "self_attn.o_proj.weight": (4, 4),
        "input_layernorm.weight": (4,),
        "post_attention_layernorm.weight": (4,),
        "mlp.gate.weight": (_EXPERTS, 4),
    }
    for expert in range(_EXPERTS):
        shapes |= {f"mlp.experts.{expert}.{name}.weight": (2, 4) for name in ("gate_proj", "up_proj", "down_proj")}
    return {
        f"model.layers.{layer}.{name}": TensorInfo(shape, torch.bfloat16)
        for layer in _layers(num_tensors)
        for name, shape in shapes.items()
    }


def _renames(num_tensors: int) -> StateMapper:
    return parallel(*(rename(f"h.{index}.weight", f"layers.{index}.weight") for index in range(num_tensors)))


def _renames_source(num_tensors: int) -> _Tensors:
    return {f"h.{index}.weight": TensorInfo((4,), torch.float32) for index in range(num_tensors)}


@contextmanager
def _folder_of(source: _Tensors, *, wanted: bool) -> Generator[Path | None]:
    """Write files with the tensors of `source` and their index, and yield the folder; None unless `wanted`."""
    if not wanted:
        yield None
        return
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        names = list(source)
        weight_map: dict[str, str] = {}
        for file in range(_FILES):
            file_name = f"model-{file + 1:05d}-of-{_FILES:05d}.safetensors"
            part = {name: torch.zeros(source[name].shape, dtype=source[name].dtype) for name in names[file::_FILES]}
            save_file(part, folder / file_name)
            weight_map.update(dict.fromkeys(part, file_name))
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        yield folder


if __name__ == "__main__":
    main()
