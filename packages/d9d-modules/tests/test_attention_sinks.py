import torch

from d9d_modules.attention_sinks import AttentionSinks


def test_scores_start_from_a_normal_distribution() -> None:
    sinks = AttentionSinks(10_000, init_std=0.3)
    assert abs(sinks().std().item() - 0.3) < 0.02
    assert sinks() is sinks.weight


def test_resetting_sets_every_score() -> None:
    sinks = AttentionSinks(16)
    torch.nn.init.constant_(sinks.weight, torch.nan)
    sinks.reset_parameters()
    assert sinks().isfinite().all()
