"""Table of mistakes that other tests cover: when each is seen, its message, its exit code, and the test."""

# ruff: noqa: E501 - a table of messages

from typing import NamedTuple

BEFORE, FIRST, LATER, NEVER = "before the start", "in the first step", "later", "never"


class Row(NamedTuple):
    """Row of the table. `test` is file and function; a mistake that is never seen has a reason as its message."""

    mistake: str
    seen: str
    message: str
    code: int
    test: str


_JOB, _ENGINE = "packages/d9d-loop/tests/job", "packages/d9d-loop/tests/engine"
_HERE = "integration_tests/test_mistakes.py"
_DIGEST = f"{_JOB}/test_code_digest.py::test_a_job_names_what_differs_between_its_ranks"
_CONTENTS = "packages/d9d-loop/tests/data/test_contents.py::test_data_that_differ_between_ranks_are_an_error"
_MEETING = "packages/d9d-dist/tests/test__rendezvous.py"
_EVERY = f"{_JOB}/test_rehearsal.py::test_an_interval_of_evaluations_needs_evaluation_data"
_WORDS = "packages/d9d-loop/tests/config/test__config_errors.py::test_names_of_other_trainers_suggest_our_key"

ROWS = [
    Row("name of another trainer (`lr`)", BEFORE, "did you mean optimizer.learning_rate?", 2, _WORDS),
    Row("mean with a count", BEFORE, "Loss.mean(mean, count)", 2, f"{_JOB}/test_sum_check.py::test_the_rehearsal_finds_a_mean"),
    Row("evaluation data without a key of the loss", BEFORE, "the first evaluation batch fails in ...", 2, f"{_JOB}/test_rehearsal.py::test_the_first_evaluation_batch_is_rehearsed"),
    Row("`evaluation.every` without evaluation data", BEFORE, "evaluation.every = N, but there are no evaluation data", 2, _EVERY),
    Row("another width on a rank", BEFORE, "the structure of the model differs between ... in up.weight (...)", 2, _DIGEST),
    Row("one more layer on a rank", BEFORE, "the structure of the model differs between ... (absent on rank 0, ...)", 2, _DIGEST),
    Row("other code or configuration on a rank", BEFORE, "the configuration differs between the N ranks: ... in seed (...)", 2, _DIGEST),
    Row("another length of the data on a rank", BEFORE, "the training data differs between ... in indexed.samples (...)", 2, _DIGEST),
    Row("data that are cut per rank, or made without a seed", BEFORE, "the training data differs between the N ranks: ...", 2, _CONTENTS),
    Row("invalid line in a JSONL file of up to 256 MiB", BEFORE, "file and line", 2, "packages/d9d-loop/tests/data/test_json_lines.py::test_wrong_files_are_refused"),
    Row("invalid line in a larger file", LATER, "file and line", 2, "packages/d9d-loop/tests/data/test_json_lines.py::test_a_bad_line_of_a_large_file_is_named_when_it_is_read"),
    Row("answers cut by the length", BEFORE, "number of the cut conversations; an error if all are cut", 0, "packages/d9d-loop/tests/jobs/test_text_tokens_of_jobs.py::test_conversations_that_the_length_cuts_are_counted"),
    Row("address in use", BEFORE, "rank 0 cannot listen on MASTER_ADDR = ...", 1, f"{_MEETING}::test_a_port_in_use_may_become_free"),
    Row("rank that never starts", BEFORE, "ranks 2, 3 of node 1 did not start within 15 s", 124, f"{_MEETING}::test_ranks_that_are_missing_are_named_once_while_the_others_wait"),
    Row("full disk", BEFORE, "run folder ...: No space left on device", 1, f"{_JOB}/test_run_files.py::test_a_full_disk_is_one_error_with_the_folder_on_all_ranks"),
    Row("finished run that is started again", BEFORE, "the run in ... is complete at step N: no step is trained", 0, f"{_JOB}/test_trainer_resume.py::test_a_finished_run_says_that_it_trains_nothing_and_how_to_continue"),
    Row("resumed run with another optimizer", BEFORE, "has completed N steps with other settings: optimizer.kind was ...", 2, f"{_HERE}::test_a_resumed_run_lists_changed_settings_and_refuses_another_optimizer"),
    Row("in-place operation that the rehearsal does not run", FIRST, "an in-place operation has changed a value that backward needs", 2, f"{_HERE}::test_an_in_place_operation_that_the_rehearsal_cannot_find_is_an_error_of_the_first_step"),
    Row("loss weight 0 over all samples", FIRST, "the loss weight of step 1 is 0 over all samples", 2, f"{_HERE}::test_a_loss_weight_of_zero_in_the_first_step_is_an_error"),
    Row("error in code that the rehearsal cannot run", FIRST, "the lines of the user's code, then the traceback", 1, f"{_HERE}::test_an_error_in_a_step_shows_the_users_lines_first"),
    Row("parameter without a gradient", FIRST, "names of the parameters, once", 0, f"{_ENGINE}/test_wrong_calls.py::test_parameters_without_a_gradient_are_named_once"),
    Row("parameter that is unfrozen after the start", LATER, "names of the parameters", 2, f"{_ENGINE}/test_wrong_calls.py::test_a_parameter_that_is_unfrozen_after_the_start_is_an_error"),
    Row("no update in any step", LATER, "no update was applied in the steps 1 to N: all were bad steps", 1, f"{_HERE}::test_a_run_without_any_update_fails"),
    Row("killed rank, or another failure of a rank", LATER, "Rank N failed before this rank", 125, "integration_tests/test_job_ends.py::test_the_launcher_exits_with_the_code_of_the_first_failure"),
    Row("other samples on a rank, beyond the 16 that are compared", NEVER, "reading all samples of a dataset before the start takes too long", 0, _CONTENTS),
    Row("labels that do not belong to their inputs", NEVER, "no program knows the right labels; train on a single batch", 0, ""),
]  # fmt: skip
