import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from d9d_dist import MeshConfig, UserError
from d9d_dist.testing import run_ranks
from d9d_modules import Qwen3ForCausalLM, Qwen3Params, generate

VOCAB = 8


def _successor(input_ids: Tensor) -> Tensor:
    """The most likely token is the last one plus one; the second most likely is the last one plus two."""
    return 2.0 * F.one_hot((input_ids + 1) % VOCAB, VOCAB) + 1.0 * F.one_hot((input_ids + 2) % VOCAB, VOCAB)


def test_temperature_zero_is_greedy() -> None:
    prompt = torch.tensor([[3], [6]])
    continued = generate(_successor, prompt, max_new_tokens=4, max_context=10, temperature=0).token_ids
    assert continued.tolist() == [[3, 4, 5, 6, 7], [6, 7, 0, 1, 2]]


def test_the_context_is_truncated() -> None:
    seen: list[list[int]] = []

    def model(input_ids: Tensor) -> Tensor:
        seen.append(input_ids[0].tolist())
        return _successor(input_ids)

    generate(model, torch.tensor([[0, 1]]), max_new_tokens=3, max_context=3, temperature=0)
    assert seen == [[0, 1], [0, 1, 2], [1, 2, 3]]


def test_top_k_samples_from_the_most_likely_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    prompt = torch.zeros(500, 1, dtype=torch.int64)
    drawn = generate(_successor, prompt, top_k=2, max_new_tokens=1, max_context=1, generator=generator).token_ids[:, 1]
    assert set(drawn.tolist()) == {1, 2}
    # exp(2) : exp(1)
    assert abs((drawn == 1).float().mean().item() - 0.731) < 0.07
    everything = generate(_successor, prompt, max_new_tokens=1, max_context=1, generator=generator).token_ids[:, 1]
    assert set(everything.tolist()) == set(range(VOCAB))


def test_top_k_beyond_the_vocabulary_samples_from_all() -> None:
    continued = generate(_successor, torch.tensor([[0]]), max_new_tokens=2, max_context=4, top_k=100).token_ids
    assert continued.shape == (1, 3)


def test_low_temperature_sharpens() -> None:
    prompt = torch.zeros(300, 1, dtype=torch.int64)
    drawn = generate(_successor, prompt, max_new_tokens=1, max_context=1, temperature=0.05).token_ids[:, 1]
    assert drawn.eq(1).all()


def test_equal_seeds_give_equal_text_and_no_graph() -> None:
    params = Qwen3Params(
        vocab_size=16, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, intermediate_size=8
    )
    model = Qwen3ForCausalLM(params)
    prompt = torch.randint(0, 16, (2, 3))
    first, second = (
        generate(model, prompt, max_new_tokens=6, max_context=4, generator=torch.Generator().manual_seed(5)).token_ids
        for _ in range(2)
    )
    assert torch.equal(first, second)
    assert torch.equal(first[:, :3], prompt)


def test_row_seeds_sample_the_same_tokens_in_any_split_of_the_rows() -> None:
    seeds = torch.arange(400) * 7 - 11

    def sample(some: Tensor) -> Tensor:
        prompt = torch.zeros(len(some), 1, dtype=torch.int64)
        return generate(_successor, prompt, row_seeds=some, top_k=2, max_new_tokens=3, max_context=4).token_ids

    whole = sample(seeds)
    assert torch.equal(torch.cat([sample(part) for part in seeds.split((1, 150, 249))]), whole)
    assert torch.equal(sample(seeds.flip(0)), whole.flip(0))
    steps = whole.diff(dim=1) % VOCAB  # 1 with probability e / (e + 1), else 2
    assert set(steps.unique().tolist()) == {1, 2}
    for drawn in steps.unbind(1):
        assert abs((drawn == 1).float().mean().item() - 0.731) < 5 * (0.731 * 0.269 / 400) ** 0.5
    prompt = torch.zeros(400, 1, dtype=torch.int64)
    even = generate(
        lambda ids: torch.zeros(*ids.shape, VOCAB), prompt, row_seeds=seeds, max_new_tokens=2, max_context=4
    )
    repeats = (even.token_ids[:, 1] == even.token_ids[:, 2]).float().mean().item()
    assert abs(repeats - 1 / VOCAB) < 5 * (1 / VOCAB * (1 - 1 / VOCAB) / 400) ** 0.5  # tokens of a row are independent


def test_row_seeds_are_checked() -> None:
    prompt = torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(UserError, match=r"row_seeds have shape \(3,\) and dtype torch\.int64; expected torch\.int64"):
        generate(_successor, prompt, row_seeds=torch.arange(3), max_new_tokens=1, max_context=1)
    with pytest.raises(UserError, match="got row_seeds and a generator; expected one of them"):
        generate(
            _successor,
            prompt,
            row_seeds=torch.arange(2),
            generator=torch.Generator(),
            max_new_tokens=1,
            max_context=1,
        )


def test_invalid_options_raise() -> None:
    prompt = torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(UserError, match=r"input_ids have shape \(2, 0\); expected \[batch, length\] with length >= 1"):
        generate(_successor, prompt.new_zeros(2, 0), max_new_tokens=1, max_context=1)
    with pytest.raises(UserError, match=r"max_context = 0; expected at least 1 token"):
        generate(_successor, prompt, max_new_tokens=1, max_context=0)
    with pytest.raises(UserError, match=r"temperature = -1\.0; expected 0 \(greedy decoding\) or more"):
        generate(_successor, prompt, max_new_tokens=1, max_context=1, temperature=-1.0)
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(
            UserError, match=rf"temperature = {wrong}; expected 0 .greedy decoding. or more, and finite"
        ):
            generate(_successor, prompt, max_new_tokens=1, max_context=1, temperature=wrong)
    with pytest.raises(UserError, match=r"max_new_tokens = -1; expected 0 or more"):
        generate(_successor, prompt, max_new_tokens=-1, max_context=1)
    with pytest.raises(UserError, match=r"top_k = 0; expected at least 1, or None for all tokens"):
        generate(_successor, prompt, max_new_tokens=1, max_context=1, top_k=0)
    with pytest.raises(UserError, match=r"pad_to_multiple_of = 0; expected at least 1"):
        generate(_successor, prompt, max_new_tokens=1, max_context=5, pad_to_multiple_of=0)


def test_padding_does_not_change_the_generated_text() -> None:
    lengths: list[int] = []

    def counting(ids: torch.Tensor) -> torch.Tensor:
        lengths.append(ids.shape[1])
        return F.one_hot(ids.cumsum(dim=1) % 7, num_classes=7).float()

    prompt = torch.tensor([[1, 2, 3]])
    plain = generate(counting, prompt, max_new_tokens=4, max_context=5, temperature=0).token_ids
    assert lengths == [3, 4, 5, 5]
    padded = generate(counting, prompt, max_new_tokens=4, max_context=5, temperature=0, pad_to_multiple_of=4).token_ids
    assert lengths[4:] == [4, 4, 8, 8]
    assert torch.equal(padded, plain)


class _Pipeline:
    """Function of a rank that must run as many forward passes as the other rank, whose rows are others."""

    rows_group, row_multiple = None, 1

    def __init__(self) -> None:
        self.data_group = torch.distributed.group.WORLD
        self.num_calls = 0

    def __call__(self, input_ids: Tensor) -> Tensor:
        self.num_calls += 1
        return _successor(input_ids)


def _until_a_stop() -> tuple[list[int], int]:
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        model, prompt = _Pipeline(), torch.tensor([[[3], [1]][ctx.rank]])
        found = generate(model, prompt, max_new_tokens=6, max_context=8, temperature=0, stop_tokens=[5])
        return found.token_ids[found.mask].tolist(), model.num_calls


def test_ranks_with_other_rows_run_as_many_forward_passes() -> None:
    assert run_ranks(_until_a_stop, world_size=2) == [([3, 4, 5], 4), ([1, 2, 3, 4, 5], 4)]
