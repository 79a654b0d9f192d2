"""Memory of Qwen3 decoders on the fake accelerator against a formula, from one rank to 1,024."""

from dataclasses import dataclass
from typing import Any

import pytest
from device_jobs import Case, rehearsed
from fake_accelerator import why_no_fake_accelerator

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(why_no_fake_accelerator() is not None, reason=str(why_no_fake_accelerator())),
]

_VOCABULARY, _LAYERS = 151_936, 4


@dataclass(frozen=True)
class Size:
    """Sizes of a Qwen3 decoder, cut to four layers; head dim 128.

    Attributes:
        width: Hidden size.
        heads: Numbers of query and key/value heads.
        inner: Size of the feed-forward, or of each expert.
        experts: Number of experts; 0 for a dense decoder.
    """

    width: int
    heads: tuple[int, int]
    inner: int
    is_tied: bool = False
    experts: int = 0

    @property
    def num_parameters(self) -> int:
        attention = 128 * self.width * 2 * sum(self.heads) + 2 * 128
        feed_forward = 3 * self.width * self.inner * max(1, self.experts) + self.width * self.experts
        ends = _VOCABULARY * self.width * (1 if self.is_tied else 2) + self.width
        return _LAYERS * (attention + feed_forward + 2 * self.width) + ends

    @property
    def model(self) -> dict[str, Any]:
        return {
            "vocab_size": _VOCABULARY,
            "hidden_size": self.width,
            "num_layers": _LAYERS,
            "num_heads": self.heads[0],
            "num_kv_heads": self.heads[1],
            "head_dim": 128,
            "intermediate_size": self.inner,
            "tie_word_embeddings": self.is_tied,
            "max_position_embeddings": 40_960,
        }


SIZES = {
    "0.6B": Size(1024, (16, 8), 3072, is_tied=True),
    "1.7B": Size(2048, (16, 8), 6144, is_tied=True),
    "4B": Size(2560, (32, 8), 9728, is_tied=True),
    "8B": Size(4096, (32, 8), 12_288),
    "14B": Size(5120, (40, 8), 17_408),
    "32B": Size(5120, (64, 8), 25_600),
    "30B-A3B": Size(2048, (32, 4), 768, experts=128),
}


def _case(size: Size, num_ranks: int) -> Case:
    experts = {"num_experts": size.experts, "top_k": 8, "intermediate_size": size.inner} if size.experts else None
    return Case(
        mesh={"data_parallel_shard": num_ranks},
        world_size=num_ranks,
        model=size.model,
        experts=experts,
        length=1024,
        settings={"parallelism": {"activation_checkpointing": "full"}},
    )


@pytest.mark.parametrize("name", SIZES)
def test_state_takes_12_bytes_per_element_and_the_rest_does_not_depend_on_the_ranks(name: str) -> None:
    size = SIZES[name]
    logs = rehearsed({str(num_ranks): _case(size, num_ranks) for num_ranks in (1, 8, 1024)})
    beyond = {}
    for num_ranks in (1, 8, 1024):
        log, state = logs[str(num_ranks)], 12 * size.num_parameters / num_ranks
        # Each parameter and state tensor is rounded up to blocks of 512 bytes, and rank 0 has the longest shards.
        assert state <= log.start_bytes <= 1.01 * state + 2**20, f"{num_ranks} ranks: {log.start_bytes} for {state}"
        beyond[num_ranks] = log.peak_bytes - log.start_bytes
    # Of the rest, only the gradients of this rank's shards depend on the number of ranks.
    assert abs(beyond[8] - beyond[1024]) <= 4 * size.num_parameters / 8, beyond
