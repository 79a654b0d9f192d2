"""Generation from caches gives the results of generation that recomputes the whole context."""

from dataclasses import dataclass
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn

from d9d_dist import MeshConfig, StageInfo, UserError, materialize, sdpa_attention
from d9d_dist.testing import run_ranks
from d9d_modules import (
    LLAMA3,
    QWEN3,
    AttentionOptions,
    DecoderForCausalLM,
    DecoderParams,
    DynamicNtkScaling,
    GatedDeltaNet,
    GroupedQueryAttention,
    Llama3ForCausalLM,
    MultiHeadLatentAttention,
    Qwen3ForCausalLM,
    Qwen3Params,
    decoder_from_hugging_face,
    generate,
    parallelize_decoder,
    rotary_tables,
)
from d9d_modules.decoding import CachedContext, WholeContext
from d9d_modules.linear import Linear
from d9d_modules.mixer_cache import PositionCache
from d9d_state import StateMapper, load_model_state

VOCAB, WIDTH = 19, 16


@final
@dataclass(frozen=True, kw_only=True)
class MixedParams(DecoderParams):
    """Decoder whose layers have the named token mixers."""

    mixers: tuple[str, ...] = ()

    @property
    def rotated_features(self) -> int:
        return 8

    def mixer_from_hugging_face(self, index: int) -> StateMapper:
        raise NotImplementedError

    def mixer(self, index: int) -> nn.Module:  # noqa: PLR0911  (one for each mixer)
        grouped: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "init_std": 0.3}
        match self.mixers[index]:
            case "full":
                return GroupedQueryAttention(WIDTH, qk_norm_eps=1e-6, output_gate=True, **grouped)
            case "bidirectional":
                return GroupedQueryAttention(WIDTH, options=AttentionOptions(is_causal=False), **grouped)
            case "window":
                return GroupedQueryAttention(WIDTH, options=AttentionOptions(window=4), **grouped)
            case "sinks":
                options = AttentionOptions(window=3, softcap=5.0)
                return GroupedQueryAttention(WIDTH, sinks=True, options=options, **grouped)
            case "latent":
                return MultiHeadLatentAttention(
                    WIDTH, num_heads=2, kv_rank=6, head_dim=4, rotary_dim=8, value_dim=5, init_std=0.3
                )
            case "delta":
                return GatedDeltaNet(
                    WIDTH, num_key_heads=2, num_value_heads=4, key_dim=3, value_dim=5, conv_width=3, init_std=0.3
                )
            case name:
                return Mean(name)


class Mean(nn.Module):
    """Token mixer without a cache."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.proj = name, Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, rotary: Any) -> Tensor:
        return self.proj(x.cumsum(dim=1))


def decoder(*mixers: str, **changes: Any) -> DecoderForCausalLM:
    params = MixedParams(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_layers=len(mixers),
        intermediate_size=12,
        initializer_range=0.3,
        max_position_embeddings=64,
        mixers=mixers,
        **changes,
    )
    torch.manual_seed(0)
    return DecoderForCausalLM(params).double()


MIXERS = ("full", "window", "sinks", "latent", "delta")
ROUNDING = torch.finfo(torch.float32).eps
"""Log-probabilities are computed in float64 here and rounded to float32 once, so they differ by one unit at most."""

PROMPTS = torch.arange(21).view(3, 7) * 5 % VOCAB
PADDED = torch.tensor([[0] * 5 + [1] * 2, [1] * 7, [0] + [1] * 6], dtype=torch.bool)


@pytest.mark.parametrize("mask", [None, PADDED], ids=["equal lengths", "padded"])
@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("mixer", MIXERS)
@torch.no_grad()
def test_logits_equal_those_of_the_whole_context(mixer: str, multiple: int, mask: Tensor | None) -> None:
    layers = (mixer, "full", mixer)
    cached = CachedContext(decoder(*layers), capacity=15, multiple=multiple, max_context=12)
    whole = WholeContext(decoder(*layers), multiple=multiple, max_context=12)
    ids = PROMPTS
    for _ in range(8):  # 7 to 14 tokens: the last ones are beyond max_context
        got, expected = cached(ids, mask), whole(ids, mask)
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
        ids = torch.cat((ids, expected.argmax(dim=-1, keepdim=True)), dim=1)
        mask = None if mask is None else torch.cat((mask, mask.new_ones(3, 1)), dim=1)


@torch.no_grad()
def test_padded_rows_generate_the_same_tokens_as_unpadded_ones() -> None:
    model = decoder(*MIXERS)
    got = generate(model, PROMPTS, prompt_mask=PADDED, max_new_tokens=5, max_context=30, temperature=0)
    for row, length in enumerate((2, 7, 6)):
        alone = generate(model, PROMPTS[row : row + 1, -length:], max_new_tokens=5, max_context=30, temperature=0)
        assert torch.equal(got.token_ids[row, -5:], alone.token_ids[0, -5:])
        torch.testing.assert_close(got.log_probs[row], alone.log_probs[0], rtol=ROUNDING, atol=0)
    assert torch.equal(got.mask, torch.cat((PADDED, torch.ones(3, 5, dtype=torch.bool)), dim=1))


def test_the_cache_computes_one_position_per_token() -> None:
    model = decoder("full")
    lengths: list[int] = []
    model.backbone.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    generate(model, PROMPTS, max_new_tokens=4, max_context=9)
    assert lengths == [7, 1, 1, 9]
    lengths.clear()
    generate(model, PROMPTS, max_new_tokens=3, max_context=30, use_cache=False)
    assert lengths == [7, 8, 9]


def test_generation_does_not_change_the_model() -> None:
    model = decoder(*MIXERS)
    model.backbone.layers["0"].eval()
    before = model(PROMPTS)
    generate(model, PROMPTS, max_new_tokens=2, max_context=30)
    assert model.training
    assert not model.backbone.layers["0"].training
    assert torch.equal(model(PROMPTS), before)
    stopped = "stop"
    with pytest.raises(RuntimeError, match=stopped):
        generate(model, PROMPTS, max_new_tokens=2, max_context=30, on_tokens=_raise)
    assert torch.equal(model(PROMPTS), before)


def _raise(tokens: Tensor) -> None:
    raise RuntimeError("stop")


def test_sliding_windows_keep_only_their_positions() -> None:
    cache = PositionCache(100, window=4)
    cache.num_new = 6
    _, (first,) = cache.extend(None, torch.arange(8).view(1, 8))  # two of them are padding
    assert first.shape[1] == 8
    cache.num_new = 1
    _, (second,) = cache.extend(None, torch.tensor([[50]]))
    assert second.tolist() == [[3, 4, 5, 50]]


@final
class _Windowed:
    """Attention function of a user that declares its window, and records the number of keys."""

    window = 4
    num_keys = 0

    def __call__(self, q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, *, documents_BS: Tensor | None = None) -> Tensor:
        self.num_keys = k_BSGK.shape[1]
        return sdpa_attention(q_BLHK, k_BSGK, v_BSGK, documents_BS=documents_BS)


@torch.no_grad()
def test_the_cache_of_any_function_that_declares_a_window_keeps_only_the_window() -> None:
    attention = GroupedQueryAttention(WIDTH, num_heads=2, num_kv_heads=1, head_dim=8)
    attention.attention_function = windowed = _Windowed()
    cache = attention.start_cache(100)
    for start, length in ((0, 8), (8, 1)):
        cache.num_new = length
        positions = torch.arange(start, start + length).view(1, -1)
        attention(torch.randn(1, length, WIDTH), rotary_tables(positions, head_dim=8, theta=100.0))
    assert windowed.num_keys == 4


@torch.no_grad()
def test_log_probs_equal_a_forward_over_the_generated_text() -> None:
    model = decoder("full", "delta")
    got = generate(
        model, PROMPTS, max_new_tokens=5, max_context=30, temperature=2.0, generator=torch.Generator().manual_seed(0)
    )
    log_probs = model(got.token_ids)[:, 6:-1].log_softmax(dim=-1).gather(2, got.token_ids[:, 7:, None]).squeeze(2)
    torch.testing.assert_close(got.log_probs, log_probs.float(), rtol=ROUNDING, atol=0)


def test_rows_end_after_a_stop_token() -> None:
    model = decoder("full", "window")
    free = generate(model, PROMPTS, max_new_tokens=8, max_context=30, temperature=0)
    stop = int(free.token_ids[0, 9])
    stopped = generate(
        model, PROMPTS, max_new_tokens=8, max_context=30, temperature=0, stop_tokens=[stop], pad_token=VOCAB - 1
    )
    num_new = stopped.log_probs.shape[1]
    for row in range(3):
        tokens = free.token_ids[row, 7:].tolist()
        end = tokens.index(stop) + 1 if stop in tokens else 8
        assert stopped.token_ids[row, 7:].tolist() == (tokens[:end] + [VOCAB - 1] * 8)[:num_new]
        assert stopped.mask[row, 7:].tolist() == ([True] * end + [False] * 8)[:num_new]
        assert stopped.log_probs[row, end:].eq(0).all()
        torch.testing.assert_close(stopped.log_probs[row, :end], free.log_probs[row, :end], rtol=ROUNDING, atol=0)


def test_generation_ends_when_all_rows_have_ended() -> None:
    model = decoder("full")
    free = generate(model, PROMPTS[:1], max_new_tokens=8, max_context=30, temperature=0)
    stop = int(free.token_ids[0, 8])
    first = free.token_ids[0, 7:].tolist().index(stop)
    stopped = generate(model, PROMPTS[:1], max_new_tokens=8, max_context=30, temperature=0, stop_tokens=[3, stop])
    assert stopped.token_ids.shape[1] <= 7 + first + 1


def test_models_without_a_cache_are_refused_or_recomputed() -> None:
    def refused(model: Any, message: str) -> None:
        with pytest.raises(UserError, match=rf"use_cache = True, but {message}; expected a DecoderForCausalLM"):
            generate(model, PROMPTS, max_new_tokens=1, max_context=30, use_cache=True)

    refused(lambda ids: ids, "the model is a function, whose layers are not known")
    refused(nn.Linear(2, 2), "the model is a Linear, not a DecoderForCausalLM")
    refused(decoder("full", "mean"), r"backbone\.layers\.1\.attention is a Mean without start_cache")
    refused(decoder("bidirectional"), r"backbone\.layers\.0\.attention is bidirectional: .*")
    scaling = DynamicNtkScaling(factor=2.0, original_max_positions=4)
    refused(decoder("full", rope_scaling=scaling), r"backbone scales rotary positions by the longest row .*")
    stage = DecoderForCausalLM(decoder("full", "full").backbone.params, StageInfo(1, 2))
    refused(stage, "the model is one of 2 pipeline stages")
    mixed = decoder("full", "mean")
    assert torch.equal(
        generate(mixed, PROMPTS, max_new_tokens=3, max_context=30, temperature=0).token_ids,
        generate(mixed, PROMPTS, max_new_tokens=3, max_context=30, temperature=0, use_cache=False).token_ids,
    )


def test_invalid_masks_are_refused() -> None:
    model = decoder("full")
    with pytest.raises(UserError, match=r"prompt_mask has shape \(1, 3\); expected that of input_ids, \(3, 7\)"):
        generate(model, PROMPTS, max_new_tokens=1, max_context=30, prompt_mask=torch.ones(1, 3))
    for wrong in (~PADDED, torch.zeros(3, 7)):
        with pytest.raises(UserError, match=r"prompt_mask has padding after a token, or a row without tokens"):
            generate(model, PROMPTS, max_new_tokens=1, max_context=30, prompt_mask=wrong)


def _references() -> dict[str, tuple[Any, Any, Any, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config
    from transformers import Qwen3ForCausalLM as Qwen3Reference

    shape: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "initializer_range": 0.4,
    }
    window: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    return {
        "qwen3": (
            Qwen3Reference(Qwen3Config(**shape, **window)),
            QWEN3.read,
            decoder_from_hugging_face,
            Qwen3ForCausalLM,
        ),
        "llama3": (
            LlamaForCausalLM(LlamaConfig(**shape)),
            LLAMA3.read,
            decoder_from_hugging_face,
            Llama3ForCausalLM,
        ),
    }


@pytest.mark.parametrize("family", ["qwen3", "llama3"])
def test_greedy_text_equals_transformers(family: str, tmp_path: Any) -> None:
    torch.manual_seed(3)
    reference, params_of, mapper_of, build = _references()[family]
    reference = reference.double().eval()
    params = params_of(reference.config.to_dict())
    model = build(params).double()
    reference.save_pretrained(tmp_path)
    load_model_state(model, tmp_path, mapper_of(params))
    prompts = torch.randint(1, 40, (3, 7))
    expected = reference.generate(
        prompts, attention_mask=PADDED.long(), max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=39
    )
    got = generate(
        model, prompts, prompt_mask=PADDED, max_new_tokens=12, max_context=40, temperature=0, stop_tokens=[39]
    ).token_ids
    assert torch.equal(got, expected)


PARAMS = Qwen3Params(
    vocab_size=20,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    intermediate_size=8,
    initializer_range=0.5,
    sliding_window=4,
    sliding_layers=(1,),
)


def _generated(mesh: dict[str, int], prompts: Tensor, stop: int, *, rows: int) -> Tensor:
    with MeshConfig(**mesh).build() as ctx:
        with torch.device("meta"):
            model = Qwen3ForCausalLM(PARAMS).double()
        parallelize_decoder(model, ctx)
        materialize(model, device=ctx.device, seed=7)
        if ctx.size("batch", "cp") > 1:
            message = r"use_cache = True, but backbone\.layers\.0\.attention is context parallel: no rank has all keys"
            with pytest.raises(UserError, match=message):
                generate(model, prompts, max_new_tokens=1, max_context=40, use_cache=True)
            return prompts
        mine = prompts.chunk(rows)[ctx.rank % rows]
        # Tensor-parallel ranks split the sequence, so each pass is padded to their number.
        got = generate(
            model,
            mine,
            max_new_tokens=12,
            max_context=40,
            temperature=0,
            pad_to_multiple_of=ctx.size("batch", "tp"),
            stop_tokens=[stop],  # ranks that share parameters stop together
        ).token_ids
        return got[:, : 7 + 12]


@pytest.mark.parametrize(
    ("mesh", "rows"), [({"data_parallel_shard": 2}, 2), ({"tensor_parallel": 2}, 1), ({"context_parallel_shard": 2}, 1)]
)
@pytest.mark.sample("mesh0-2", "mesh1-1")
def test_sharded_models_generate_the_same_text(mesh: dict[str, int], rows: int) -> None:
    torch.manual_seed(0)
    prompts = torch.randint(0, 20, (2, 7))
    model = Qwen3ForCausalLM(PARAMS).double()
    materialize(model, device=torch.device("cpu"), seed=7)
    free = generate(model, prompts, max_new_tokens=12, max_context=40, temperature=0).token_ids[:, 7:]
    stop = next(token for token in free[0].tolist() if token not in free[1].tolist())
    expected = generate(model, prompts, max_new_tokens=12, max_context=40, temperature=0, stop_tokens=[stop]).token_ids
    results = run_ranks(_generated_on_rank, mesh, prompts, stop, rows, world_size=2)
    if "context_parallel_shard" in mesh:
        return
    for rank, got in enumerate(results):
        mine = expected.chunk(rows)[rank % rows]
        assert torch.equal(got[:, : mine.shape[1]], mine[:, : got.shape[1]])
        assert got.shape == mine.shape


def _generated_on_rank(mesh: dict[str, int], prompts: Tensor, stop: int, rows: int) -> Tensor:
    return _generated(mesh, prompts, stop, rows=rows)
