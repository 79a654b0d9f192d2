"""Sizes of a decoder, from which the planner counts parameters, FLOPs and bytes in closed form.

The planner needs only these sizes, not the model itself. FLOPs are defined in `d9d_metrics.flops`.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, final

from d9d_metrics import transformer_flops_per_token


class Kernel(NamedTuple):
    """Calls of an operator with the same sizes; FLOPs and bytes are those of one call, with 2 bytes per element."""

    name: str
    flops: int
    num_bytes: float
    shapes: tuple[tuple[int, ...], ...]
    number: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """Vision tower and projector, and the images of a microbatch. They run before the first layer.

    Attributes:
        num_parameters: Number of weights.
        num_samples: Samples of the microbatch.
        num_patches: Patches of its images.
        forward: Kernels of the forward pass.
        backward: Kernels of the backward pass; none if the tower is frozen.
        saved_bytes: Peak memory of the forward pass, with 2 bytes per element.
    """

    num_parameters: int
    num_samples: int
    num_patches: float
    forward: tuple[Kernel, ...] = field(hash=False)
    backward: tuple[Kernel, ...] = field(hash=False)
    saved_bytes: float

    @property
    def flops(self) -> float:
        """Model FLOPs of the images of a sample, without the scores that attention's backward kernel recomputes."""
        again = sum(each.flops * each.number for each in self.backward if "scaled_dot_product" in each.name) / 5
        return (sum(each.flops * each.number for each in (*self.forward, *self.backward)) - again) / self.num_samples


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Sizes of a decoder-only transformer.

    Attributes:
        head_dim: Size of a query head.
        intermediate_size: Inner size of a dense feed-forward layer.
        is_gated: True for SwiGLU: three matrices; False for two.
        tie_embeddings: True if the output head shares the embedding's weight.
        learned_positions: Number of learned position embeddings.
        num_experts: Routed experts of an MoE layer; 0 for a dense model.
        expert_size: Inner size of an expert.
        num_dense_layers: Number of first layers with a dense feed-forward block, in an MoE model.
        shared_size: Inner size of the shared expert; 0 without.
        latent: Sizes of multi-head latent attention (query rank, key-value rank, rope size, value size); `None` for
            grouped-query attention.
        biased_experts: True if the products of experts have biases, and their activation function clamps its inputs.
        window: Number of keys to which each token attends in every second layer; 0 if all layers attend to all keys.
        tower: Vision tower with the images of the data; `None` for texts.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    is_gated: bool = True
    tie_embeddings: bool = False
    learned_positions: int = 0
    num_experts: int = 0
    top_k: int = 0
    expert_size: int = 0
    num_dense_layers: int = 0
    shared_size: int = 0
    latent: tuple[int, int, int, int] | None = None
    biased_experts: bool = False
    window: int = 0
    tower: Tower | None = None

    @classmethod
    def gpt(cls, *, hidden_size: int, num_layers: int, num_heads: int, vocab_size: int, length: int) -> "DecoderShape":
        """Return the shape of a GPT: multi-head attention, two-matrix feed-forward of size 4 h, tied embeddings."""
        return cls(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=hidden_size // num_heads,
            intermediate_size=4 * hidden_size,
            is_gated=False,
            tie_embeddings=True,
            learned_positions=length,
        )

    @property
    def attention_parameters(self) -> int:
        """Number of weights of one attention layer."""
        h, a = self.hidden_size, self.num_heads
        if self.latent is None:
            return h * self.head_dim * (2 * a + 2 * self.num_kv_heads)
        q, kv, rope, value = self.latent
        down = h * (q + kv + rope)
        return down + q * a * (self.head_dim + rope) + kv * a * (self.head_dim + value) + a * value * h

    @property
    def dense_parameters(self) -> int:
        """Number of weights of one dense feed-forward layer."""
        return (3 if self.is_gated else 2) * self.hidden_size * self.intermediate_size

    @property
    def expert_parameters(self) -> int:
        """Number of expert weights in one MoE layer."""
        return 3 * self.num_experts * self.hidden_size * self.expert_size

    @property
    def shared_parameters(self) -> int:
        """Number of weights in the shared expert and the router of one MoE layer."""
        return self.hidden_size * (3 * self.shared_size + self.num_experts)

    @property
    def num_sparse_layers(self) -> int:
        """Number of layers with experts."""
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    @property
    def embedding_parameters(self) -> int:
        """Number of weights of the embedding table and learned positions."""
        return self.hidden_size * (self.vocab_size + self.learned_positions)

    @property
    def head_parameters(self) -> int:
        """Number of weights of the output head that are not shared with the embedding."""
        return 0 if self.tie_embeddings else self.hidden_size * self.vocab_size

    @property
    def num_parameters(self) -> int:
        """Number of all weights, including norms but not biases."""
        sparse = self.num_sparse_layers * (self.expert_parameters + self.shared_parameters)
        dense = (self.num_layers - self.num_sparse_layers) * self.dense_parameters
        layers = self.num_layers * (self.attention_parameters + 2 * self.hidden_size) + sparse + dense
        tower = 0 if self.tower is None else self.tower.num_parameters
        return layers + self.embedding_parameters + self.head_parameters + self.hidden_size + tower

    @property
    def matmul_parameters(self) -> int:
        """Number of weights in the matrix products of one token, as in `d9d_metrics.transformer_flops_per_token`."""
        sparse = 3 * self.top_k * self.hidden_size * self.expert_size + self.shared_parameters
        dense = (self.num_layers - self.num_sparse_layers) * self.dense_parameters
        layers = self.num_layers * self.attention_parameters + self.num_sparse_layers * sparse + dense
        return layers + self.hidden_size * self.vocab_size

    def flops_per_token(self, length: int, *, causal: bool = True, logit_share: float = 1.0) -> float:
        """Return the model FLOPs per token of a training step, for sequences of `length` tokens with their images.

        `logit_share` is the share of the tokens for which the head computes logits.
        """
        rope, value_dim = (0, None) if self.latent is None else self.latent[2:]
        of_images = 0.0 if self.tower is None else self.tower.flops / length
        return of_images + transformer_flops_per_token(
            num_matmul_parameters=self.matmul_parameters - (1 - logit_share) * self.hidden_size * self.vocab_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            head_dim=self.head_dim + rope,
            value_dim=value_dim,
            window=self.window or None,
            num_window_layers=self.num_layers // 2,
            sequence_length=length,
            causal=causal,
        )
