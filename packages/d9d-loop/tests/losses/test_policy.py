from collections import defaultdict
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch
from packed_rows import Rows, packed_rows
from torch import Tensor
from torch.testing import assert_close

from d9d_dist import UserError
from d9d_loop.losses import Average, PolicyLoss, kl_divergence, truncated_importance
from d9d_loop.losses.policy import ImportanceLevel

pytestmark = pytest.mark.usefixtures("trl_without_wandb")


class Sampled:
    """Packed answers with all arguments of a policy loss."""

    def __init__(self) -> None:
        self.rows: Rows = packed_rows()
        self.policy = self.rows.values().requires_grad_()
        self.old = self.policy.detach() + 0.3 * torch.randn(self.policy.shape, dtype=torch.float64)
        self.reference, self.importance = self.rows.values(), torch.rand(self.policy.shape, dtype=torch.float64)
        self.advantages = torch.randn(12, dtype=torch.float64)
        per_document = torch.cat((self.advantages.view(3, 4), torch.zeros(3, 1)), 1)
        self.advantages_BL = per_document.gather(1, self.rows.document_ids)

    def ours(self, loss: PolicyLoss, **given: Any) -> Tensor:
        found = loss(
            self.policy,
            advantages_BL=self.advantages_BL,
            mask_BL=self.rows.mask,
            document_ids_BL=self.rows.document_ids,
            **given,
        )
        return found.total / found.weight

    def trl(self, *, generated: int | None = None, steps: int = 1, **options: Any) -> Tensor:
        """Compute the loss of trl's GRPOTrainer for the same answers, padded.

        They are those of one of `steps` steps on answers with `generated` tokens in all.
        """
        grpo = pytest.importorskip("trl.trainer.grpo_trainer")
        policy, old, reference, importance = map(
            self.rows.padded, (self.policy, self.old, self.reference, self.importance)
        )
        mask = self.rows.padded(torch.ones_like(self.policy)).long()
        args = MagicMock(delta=options.pop("delta", None), use_bias_correction_kl=False)
        args.steps_per_generation = steps
        settings: dict[str, Any] = {
            "beta": 0.0, "loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2, "args": args, "use_vllm": False,
            "importance_sampling_level": "token", "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None,
            "current_gradient_accumulation_steps": 1, "max_completion_length": 50, "aux_loss_enabled": False,
            "vllm_importance_sampling_correction": True,
            "entropy_coef": 0.0, "use_adaptive_entropy": False, "_metrics": defaultdict(lambda: defaultdict(list)),
        } | options  # fmt: skip
        trainer = MagicMock(**settings)
        trainer.model.training = args.steps_per_generation > 1
        trainer.accelerator.gather = lambda value: value
        trainer.accelerator.reduce = lambda value, **_: value
        trainer.accelerator.num_processes = 1
        trainer._get_per_token_logps_and_entropies.return_value = (policy, policy.detach(), None)
        inputs = {
            "prompt_ids": torch.zeros(12, 1).long(), "prompt_mask": torch.ones(12, 1).long(), "completion_mask": mask,
            "completion_ids": torch.zeros_like(mask), "advantages": self.advantages, "old_per_token_logps": old,
            "ref_per_token_logps": reference, "importance_sampling_ratio": importance,
            "num_items_in_batch": mask.sum() if generated is None else torch.tensor(generated),
        }  # fmt: skip
        return grpo.GRPOTrainer._compute_loss(trainer, None, inputs)

    def compare(self, found: Tensor, expected: Tensor) -> None:
        assert_close(found, expected)
        assert_close(*(torch.autograd.grad(loss, self.policy)[0] for loss in (found, expected)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (PolicyLoss(average="sequences"), {}),
        (PolicyLoss(average="tokens", clip_high=0.3), {"loss_type": "dapo", "epsilon_high": 0.3}),
        (PolicyLoss(average="tokens"), {"loss_type": "bnpo"}),
        (PolicyLoss(average="constant", max_length=50), {"loss_type": "dr_grpo"}),
        (PolicyLoss(average="sequences", max_ratio=1.3), {"delta": 1.3}),
        (
            PolicyLoss(average="sequences", ratio_level="sequence", clip_low=0.02, clip_high=0.03),
            {"importance_sampling_level": "sequence", "epsilon_low": 0.02, "epsilon_high": 0.03},
        ),
        # trl's limit of CISPO is the ratio itself.
        (PolicyLoss(clipping="stop_gradient", clip_high=0.4), {"loss_type": "cispo", "epsilon_high": 1.4}),
    ],
    ids=("grpo", "dapo", "bnpo", "dr_grpo", "dual_clip", "gspo", "cispo"),
)
def test_losses_and_gradients_equal_trl(ours: PolicyLoss, theirs: dict[str, Any]) -> None:
    sampled = Sampled()
    sampled.compare(sampled.ours(ours, old_log_probs_BL=sampled.old), sampled.trl(**theirs))


@pytest.mark.slow  # imports TRL
def test_dapo_over_the_tokens_of_a_generated_batch_equals_that_of_trl() -> None:
    sampled = Sampled()
    expected = sampled.trl(loss_type="dapo", epsilon_high=0.3, generated=333, steps=3)  # 3 steps of 12 answers
    loss = PolicyLoss(average="constant", max_length=333 / 36, clip_high=0.3)
    sampled.compare(sampled.ours(loss, old_log_probs_BL=sampled.old), expected)


def test_the_gradient_of_rloo_equals_that_of_trl() -> None:
    """The samples are the policy's own. trl uses the ratio of the sequence, and d9d the ratio of each token."""
    rloo = pytest.importorskip("trl.trainer.rloo_trainer")
    sampled = Sampled()
    policy, mask = sampled.rows.padded(sampled.policy), sampled.rows.padded(torch.ones_like(sampled.policy)).long()
    trainer = MagicMock(epsilon_low=0.2, epsilon_high=0.2, aux_loss_enabled=False)
    trainer.accelerator.gather = lambda value: value
    trainer.accelerator.reduce = lambda value, **_: value
    trainer._get_per_token_logps_and_entropies.return_value = (policy, policy.detach(), None)
    inputs = {
        "prompt_ids": torch.zeros(12, 1).long(), "prompt_mask": torch.ones(12, 1).long(), "completion_mask": mask,
        "completion_ids": torch.zeros_like(mask), "advantages": sampled.advantages,
        "old_logps": (policy.detach() * mask).sum(1),
    }  # fmt: skip
    expected = rloo.RLOOTrainer._compute_loss(trainer, None, inputs)
    found = sampled.ours(PolicyLoss(clipping="none", average="constant", max_length=1))
    assert_close(*(torch.autograd.grad(loss, sampled.policy)[0] for loss in (found, expected)))


def test_kl_penalty_and_importance_equal_trl() -> None:
    sampled = Sampled()
    found = sampled.ours(
        PolicyLoss(average="sequences", kl_weight=0.3),
        old_log_probs_BL=sampled.old,
        reference_log_probs_BL=sampled.reference,
        importance_BL=sampled.importance,
    )
    sampled.compare(found, sampled.trl(beta=0.3, use_vllm=True))


def test_the_first_update_has_the_gradient_of_reinforce() -> None:
    sampled = Sampled()
    answers = sampled.rows.take(sampled.policy)
    expected = -sum(a * each.sum() for a, each in zip(sampled.advantages, answers, strict=True)) / 12
    for clipping in ("clip", "none", "stop_gradient"):
        loss = PolicyLoss(clipping=clipping, average="constant", max_length=1)  # RLOO
        (found,) = torch.autograd.grad(sampled.ours(loss), sampled.policy)
        (gradient,) = torch.autograd.grad(expected, sampled.policy, retain_graph=True)
        assert_close(found, gradient)


@pytest.mark.parametrize("average", ["tokens", "sequences"])
def test_router_losses_are_averaged_like_token_losses(average: Average) -> None:
    sampled = Sampled()
    auxiliary = torch.rand_like(sampled.policy)
    loss = PolicyLoss(average=average)
    answers = sampled.rows.take(auxiliary)
    expected = torch.cat(answers).mean() if average == "tokens" else torch.stack([a.mean() for a in answers]).mean()
    assert_close(sampled.ours(loss, auxiliary_losses_BL=auxiliary) - sampled.ours(loss), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_low": 0.0}, "clip_low = 0.0 and clip_high = None; expected both above 0"),
        ({"max_ratio": 1.1}, r"max_ratio = 1.1 with clipping = 'clip'; expected a number above 1 \+ clip_high = 1.2"),
        ({"average": "constant"}, "max_length = None with average = 'constant'"),
        ({"average": "constant", "max_length": torch.nan}, "max_length = nan; expected a finite number"),
        ({"max_length": 5}, "max_length = 5 with average = 'tokens'"),
        ({"kl_weight": -0.1}, "kl_weight = -0.1; expected 0 or more"),
        ({"ratio_level": "answer"}, "ratio_level = 'answer'; expected one of token, sequence"),
        ({"clipping": "ppo"}, "clipping = 'ppo'; expected one of clip, stop_gradient, none"),
        ({"kl_form": "k4"}, "kl_form = 'k4'; expected one of k1, k2, k3"),
        ({"average": "token"}, "average = 'token'; expected one of tokens, sequences, constant"),
        ({"kl_weight": torch.nan}, "kl_weight = nan; expected a finite number"),
        ({"clip_high": torch.nan}, "clip_high = nan; expected a finite number"),
        ({"max_ratio": torch.nan}, "max_ratio = nan; expected a finite number"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        PolicyLoss(**options)


def test_a_penalty_needs_a_reference_and_a_reference_a_penalty() -> None:
    sampled = Sampled()
    with pytest.raises(UserError, match=r"kl_weight = 0.1, and reference log-probabilities are missing"):
        sampled.ours(PolicyLoss(kl_weight=0.1))
    with pytest.raises(UserError, match=r"kl_weight = 0.0, and reference log-probabilities are given"):
        sampled.ours(PolicyLoss(), reference_log_probs_BL=sampled.reference)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_values_outside_the_answers_do_not_change_the_gradient(level: ImportanceLevel) -> None:
    sampled, loss = Sampled(), PolicyLoss(ratio_level=level, kl_weight=0.1)

    def gradient(outside: float) -> Tensor:
        def masked(values: Tensor) -> Tensor:
            return torch.where(sampled.rows.mask, values, outside)

        found = loss(
            sampled.policy,
            advantages_BL=masked(sampled.advantages_BL),
            mask_BL=sampled.rows.mask,
            document_ids_BL=sampled.rows.document_ids,
            old_log_probs_BL=masked(sampled.old),
            reference_log_probs_BL=masked(sampled.reference),
            importance_BL=masked(sampled.importance),
        )
        return torch.autograd.grad(found.total, sampled.policy)[0]

    assert_close(gradient(torch.nan), gradient(0.0), rtol=0, atol=0)


def test_values_that_torch_would_broadcast_are_refused() -> None:
    sampled = Sampled()
    sampled.advantages_BL = sampled.advantages_BL[:, :1]  # one for each row
    with pytest.raises(UserError, match=r"advantages_BL has shape \(3, 1\), and the log-probabilities \(3, 24\)"):
        sampled.ours(PolicyLoss())


def test_values_of_other_policies_are_constants() -> None:
    """The log-probabilities of the policy itself may be passed with their graph."""
    sampled, loss = Sampled(), PolicyLoss(kl_weight=0.1, kl_form="k2")
    gradients = []
    for same in (sampled.policy, sampled.policy.detach()):
        found = sampled.ours(loss, old_log_probs_BL=same, reference_log_probs_BL=same + 0.5, importance_BL=same.exp())
        gradients.append(torch.autograd.grad(found, sampled.policy)[0])
    assert_close(gradients[0], gradients[1], rtol=0, atol=0)
    assert gradients[0].any()


def test_masks_are_bool() -> None:
    sampled = Sampled()
    sampled.rows.mask = sampled.rows.mask.long()
    with pytest.raises(UserError, match=r"mask_BL has dtype torch.int64; expected torch.bool. Pass mask_BL.bool\(\)"):
        sampled.ours(PolicyLoss())


def test_k1_and_k3_have_the_divergence_as_their_mean() -> None:
    policy, reference = torch.randn(2, 6, dtype=torch.float64).log_softmax(-1)
    expected = (policy.exp() * (policy - reference)).sum()
    for form in ("k1", "k3"):
        assert_close((policy.exp() * kl_divergence(policy, reference, form=form)).sum(), expected)
    assert (kl_divergence(policy, reference, form="k3") >= 0).all()


def test_k2_has_the_gradient_of_the_divergence() -> None:
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    policy, reference = logits.log_softmax(-1), torch.randn(6, dtype=torch.float64).log_softmax(-1)
    expected = (policy.exp() * (policy - reference)).sum()
    estimate = (policy.detach().exp() * kl_divergence(policy, reference, form="k2")).sum()
    assert_close(*(torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (estimate, expected)))


def test_ratios_are_truncated() -> None:
    rows = packed_rows()
    trained, rollout = rows.values(), rows.values()
    found = truncated_importance(trained, rollout, mask_BL=rows.mask, document_ids_BL=rows.document_ids, maximum=1.5)
    assert_close(found, torch.where(rows.mask, (trained - rollout).exp().clamp(max=1.5), 1.0))
    assert (found == 1.5).any()
    assert not found.requires_grad


def test_the_weight_of_a_sequence_is_the_truncated_product_of_token_ratios() -> None:
    rows = packed_rows()
    trained = rows.values()
    rollout = trained + 0.1 * torch.randn(trained.shape, dtype=torch.float64)
    found = truncated_importance(
        trained, rollout, mask_BL=rows.mask, document_ids_BL=rows.document_ids, maximum=1.05, level="sequence"
    )
    for weights, ours, theirs in zip(*map(rows.take, (found, trained, rollout)), strict=True):
        assert_close(weights, (ours - theirs).exp().prod().clamp(max=1.05).expand_as(weights))


def test_ratios_need_equal_shapes_and_a_known_level() -> None:
    rows = packed_rows()
    values, wrong = rows.values(), "answer"
    options: dict[str, Any] = {"mask_BL": rows.mask, "document_ids_BL": rows.document_ids}
    with pytest.raises(
        UserError, match=r"rollout_log_probs_BL has shape \(3, 1\), and the log-probabilities \(3, 24\)"
    ):
        truncated_importance(values, values[:, :1], **options)
    with pytest.raises(UserError, match="level = 'answer'; expected one of token, sequence"):
        truncated_importance(values, values, level=wrong, **options)  # ty: ignore[invalid-argument-type]


def test_a_maximum_below_one_is_refused() -> None:
    one = torch.zeros(1, 1)
    with pytest.raises(UserError, match=r"maximum = 0.5; expected 1 or more"):
        truncated_importance(one, one, mask_BL=one.bool(), document_ids_BL=one.long(), maximum=0.5)
    with pytest.raises(UserError, match="level = 'answer'; expected one of token, sequence"):
        truncated_importance(one, one, mask_BL=one.bool(), document_ids_BL=one.long(), level=cast(Any, "answer"))
