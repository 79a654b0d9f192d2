"""Post-training in layouts equals one process: loss, every gradient, norm and parameters."""

import pytest
from oracle_grid import RTOL
from post_training import MUTANTS, in_layout, one_process

from d9d_dist import ContextMethod
from d9d_dist.testing import RankError, differences

ROWS: tuple[tuple[str, str, str, ContextMethod], ...] = (
    ("sft", "dense", "pp=2,schedule=zbv,microbatch=1", "all_gather"),
    ("dpo", "dense", "cp_shard=2", "all_gather"),
    ("dpo", "lora", "pp=2,dp_shard=2,microbatch=2", "all_gather"),
    ("dpo", "moe with losses", "ep=2,dp_shard=2,microbatch=2", "all_gather"),
    ("grpo", "moe with losses", "pp=2,cp_shard=2,microbatch=2", "all_gather"),
    ("gspo", "dense", "cp_shard=2,dp_replicate=2", "all_to_all"),
    ("reward", "dense", "pp=2,cp_shard=2,microbatch=2", "ring"),
    ("replay", "moe", "pp=2,ep=2,tp=2,microbatch=2", "all_gather"),
    ("distill", "dense", "pp=2,cp_shard=2,schedule=zb1p,microbatch=1", "ring"),
    ("sft", "lora", "dp_shard=2,tp=2,microbatch=2", "all_gather"),
    ("sft", "moe", "ep=2,dp_shard=2", "all_gather"),
    ("grpo", "moe", "ep=2,dp_shard=2,microbatch=2", "all_gather"),
    ("gspo", "moe with losses", "ep=2,tp=2,microbatch=2", "all_gather"),
    ("dpo", "moe with losses", "pp=2,cp_shard=2,schedule=zbv,microbatch=1", "ring"),
    ("dpo", "dense", "tp=2,cp_shard=2,microbatch=2", "ring"),
    ("grpo", "dense", "pp=2,cp_shard=2,microbatch=2", "all_gather"),
    ("dapo", "dense", "dp_shard=2,microbatch=1", "all_gather"),
    ("reward", "dense", "dp_shard=2,microbatch=1", "all_gather"),
    ("replay", "moe", "ep=2,cp_shard=2,microbatch=2", "all_gather"),
    ("distill", "dense", "tp=2,dp_shard=2", "all_gather"),
    ("distill", "moe with losses", "ep=2,tp=2,microbatch=2", "all_gather"),
    *(
        (task, "dense", layout, method)
        for task in ("sft", "dpo", "grpo", "gspo", "distill")
        for layout, method in (
            ("pp=2,schedule=interleaved_1f1b,microbatch=2", "all_gather"),
            ("pp=2,schedule=dualpipev,microbatch=1", "all_gather"),
            ("dp_replicate=2,tp=2", "all_gather"),
            ("cp_shard=4", "all_gather"),
            ("cp_shard=2,cp_replicate=2", "ring"),
            ("cp_replicate=2,tp=2", "all_to_all"),
        )
    ),
)


@pytest.mark.parametrize(
    ("task", "model", "layout", "method"),
    ROWS,
)
@pytest.mark.sample(
    "dpo-dense-cp_shard=2-all_gather",
)
@pytest.mark.slow(
    "dpo-moe with losses-ep=2,dp_shard=2,microbatch=2-all_gather",
    "distill-dense-pp=2,cp_shard=2,schedule=zb1p,microbatch=1-ring",
)
def test_post_training_in_a_layout_equals_one_process(
    task: str, model: str, layout: str, method: ContextMethod
) -> None:
    found = list(differences(in_layout(task, layout, model=model, method=method), one_process(task, model), rtol=RTOL))
    assert not found, f"{len(found)} differences. First: {found[0]}"


# The lane `jobs` of .ci/nightly catches the others.
@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.sample("document_sums_are_not_reduced_over_cp", "weight_averaged_per_rank", "pairs_are_split")
def test_a_mutant_is_caught(name: str) -> None:
    mutant = MUTANTS[name]
    try:
        trace = in_layout(mutant.task, mutant.layout, model=mutant.model, mutant=name)
        found = next(differences(trace, one_process(mutant.task, mutant.model), rtol=RTOL), None)
    except RankError:
        raise
    except AssertionError as error:  # ranks that disagree on a loss or a norm are detected earlier
        found = str(error)
    assert found is not None, f"{mutant.task} in {mutant.layout} does not notice {name}"
