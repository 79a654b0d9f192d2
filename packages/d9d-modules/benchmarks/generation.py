"""Time of generation with the cache, relative to generation that recomputes the whole context for each token.

    uv run python packages/d9d-modules/benchmarks/generation.py --output generation.json

Both run in one process. Seconds are processor time, so that other load on the machine affects them little; compare
ratios, not seconds. Greedy decoding in float32; the texts of both are compared.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from d9d_modules import DecoderForCausalLM, Qwen3ForCausalLM, Qwen3Params, generate
from d9d_moe import DeepseekV3ForCausalLM, DeepseekV3Params, Qwen3MoeForCausalLM, Qwen3MoeParams


def main() -> None:
    """Measure, print JSON, and optionally write it."""
    parser = argparse.ArgumentParser(description="Time of generation with and without the cache, on the CPU.")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--models", nargs="+", default=["dense", "moe", "latent"])
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    torch.manual_seed(0)
    prompts = torch.randint(0, 4096, (args.batch, args.prompt))
    figures: dict[str, object] = {
        key: getattr(args, key) for key in ("new_tokens", "prompt", "batch", "hidden_size", "layers")
    }
    figures["threads"] = torch.get_num_threads()
    for name in args.models:
        model = _model(name, hidden_size=args.hidden_size, num_layers=args.layers)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        texts = []
        for _ in range(args.repeats):
            for use_cache, times in seconds.items():
                start = time.process_time()
                text = generate(
                    model,
                    prompts,
                    max_new_tokens=args.new_tokens,
                    max_context=args.prompt + args.new_tokens,
                    temperature=0,
                    use_cache=use_cache,
                ).token_ids
                times.append(time.process_time() - start)
                texts.append(text)
        figures[name] = {
            "seconds_with_cache": round(statistics.median(seconds[True]), 3),
            "seconds_without": round(statistics.median(seconds[False]), 3),
            "speedup": round(statistics.median(b / a for a, b in zip(*seconds.values(), strict=True)), 1),
            "equal_tokens": sum(int(texts[0].eq(text).sum()) for text in texts) / sum(map(torch.numel, texts)),
        }
    print(json.dumps(figures, indent=2))
    if args.output:
        args.output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _model(name: str, *, hidden_size: int, num_layers: int) -> DecoderForCausalLM:
    heads: dict[str, Any] = {"num_heads": hidden_size // 64, "num_kv_heads": max(1, hidden_size // 128), "head_dim": 64}
    shape: dict[str, Any] = {
        "vocab_size": 4096,
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "intermediate_size": 3 * hidden_size,
    }
    experts: dict[str, Any] = {"num_experts": 8, "top_k": 2, "expert_intermediate_size": hidden_size}
    match name:
        case "dense":
            return Qwen3ForCausalLM(Qwen3Params(**shape, **heads))
        case "moe":
            return Qwen3MoeForCausalLM(Qwen3MoeParams(**shape, **heads, **experts))
        case "latent":
            latent: dict[str, Any] = {"kv_rank": 64, "q_rank": None, "head_dim": 32, "rotary_dim": 16, "value_dim": 32}
            sizes: dict[str, Any] = {
                "num_heads": hidden_size // 64,
                "num_dense_layers": 1,
                "num_groups": 1,
                "top_groups": 1,
            }
            return DeepseekV3ForCausalLM(DeepseekV3Params(**shape, **latent, **sizes, **experts))
        case _:
            raise SystemExit(f"--models {name}; expected dense, moe or latent.")


if __name__ == "__main__":
    main()
