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
_DIGEST = "packages/d9d-loop/tests/engine/test_code_digest.py::test_a_job_names_what_differs_between_its_ranks"
_CONTENTS = "packages/d9d-loop/tests/data/test_contents.py::test_data_that_differ_between_ranks_are_an_error"
_MEETING = "packages/d9d-dist/tests/groups/test__rendezvous.py"
_EVERY = f"{_JOB}/test_rehearsal.py::test_an_interval_of_evaluations_needs_evaluation_data"
_REHEARSAL, _CALLS = f"{_JOB}/test_rehearsal.py", f"{_ENGINE}/test_wrong_calls.py"
_DAMAGED = f"{_JOB}/test_trainer_resume.py::test_a_damaged_checkpoint_is_skipped_and_moved_aside"
_HUNG = "packages/d9d-loop/tests/resilience/test_hang_watchdog.py::test_the_report_names_a_rank_in_an_endless_loop_with_its_line"
_FEWER = f"{_JOB}/test_trainer.py::test_a_model_must_use_the_tensor_parallel_axis"
_VALUES = "packages/d9d-dist/tests/data_parallel/test_parallelize.py::test_values_that_differ_between_ranks_are_an_error_on_all_of_them"
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
    Row("mistake in the last, shorter batch of an epoch or of the evaluation", BEFORE, "the last batch of an epoch, of N samples, fails in ...", 2, f"{_REHEARSAL}::test_the_last_batches_are_rehearsed_too"),
    Row("mistake in `split_sequence`, or in a pipelined job", BEFORE, "the first batch fails in ...", 2, f"{_REHEARSAL}::test_context_parallelism_and_pipelines_are_rehearsed"),
    Row("code that changed since the last start", BEFORE, "the first ... batch fails in ...", 2, f"{_REHEARSAL}::test_a_resumed_job_is_rehearsed_unless_it_is_complete"),
    Row("metric whose `compute()` fails or returns a number", BEFORE, "compute() of the metric ...", 2, f"{_REHEARSAL}::test_the_values_of_metrics_are_rehearsed"),
    Row("batch norms, and an epoch that ends with too few samples for all ranks", BEFORE, "the last step of an epoch has N samples, too few for ...", 2, f"{_REHEARSAL}::test_batch_norms_and_an_epoch_that_ends_with_stand_ins_are_an_error"),
    Row("rehearsal that takes longer than 20 s, or crashes", BEFORE, "the rehearsal of the first batches took longer than 20 s", 0, f"{_REHEARSAL}::test_a_rehearsal_without_a_result_says_so"),
    Row("dataset that hangs before the start", BEFORE, "rank N has been reading the training data for 30 s", 0, "packages/d9d-loop/tests/data/test_in_fork.py::test_a_read_that_takes_long_is_named_and_not_stopped"),
    Row("event handler that takes no event", BEFORE, "the event handler ... cannot be called with an event", 2, "packages/d9d-loop/tests/test_event_bus.py::test_a_handler_that_cannot_take_an_event_is_an_error_at_once"),
    Row("own files in `export/`; files of the export that are not JSON", BEFORE, "export = true, but ...", 2, f"{_JOB}/test_plan.py::test_what_the_export_writes_is_checked_before_the_start"),
    Row("folder of checkpoints that is not writable", BEFORE, "checkpoint folder ... is a file, not a folder", 2, f"{_JOB}/test_plan.py::test_the_folder_of_checkpoints_is_checked_before_the_start"),
    Row("tensor-parallel degree, but the model has no `parallelize` for it", BEFORE, "parallelize placed ... on fewer than the N ranks of a stage", 2, _FEWER),
    Row("expert-parallel degree, but the model shards no experts", BEFORE, "mesh.expert_parallel = N, but the model provider's parallelize shards no experts", 2, "integration_tests/test_pretrain.py::test_an_expert_parallel_degree_without_experts_is_refused"),
    Row("own optimizer whose step needs a closure", BEFORE, "LBFGS.step needs the argument closure", 2, f"{_CALLS}::test_an_optimizer_that_needs_a_closure_is_an_error"),
    Row("second job in the same folder", BEFORE, "... is in use by another job (process ...)", 1, "packages/d9d-state/tests/test_folder_lock.py::test_second_job_error_names_lock_holder"),
    Row("flipped byte of the newest checkpoint", BEFORE, "file and tensor; an earlier checkpoint is loaded", 0, _DAMAGED),
    Row("flipped byte of the only checkpoint", BEFORE, "all checkpoints are damaged", 1, f"{_JOB}/test_trainer_resume.py::test_a_job_with_only_damaged_checkpoints_does_not_start_again"),
    Row("rank that stalls, or a collective on one rank only", LATER, "Rank N is missing: it is in a step, ... at FILE:LINE", 124, _HUNG),
    Row("Engine: call on one rank only", FIRST, "rank 1 called forward_backward() of the engine while rank 0 called ...", 2, f"{_ENGINE}/test_equal_on_ranks.py::test_a_call_of_one_rank_is_an_error"),
    Row("Engine: other batches on ranks of one coordinate", FIRST, "rank 1 got N batches, and an earlier rank ...", 2, f"{_ENGINE}/test_engine.py::test_ranks_of_one_data_parallel_coordinate_need_the_same_batches"),
    Row("Engine: batch norms, and other numbers of batches on ranks", FIRST, "rank 0 got fewer than N batches, and the model has batch norms in training mode", 2, f"{_ENGINE}/test_engine.py::test_stand_ins_with_synchronized_norms_are_an_error_on_all_ranks"),
    Row("Engine: a batch for a list of batches", FIRST, "as batches; expected a list of batches", 2, f"{_CALLS}::test_batches_that_are_not_a_list_are_refused"),
    Row("Engine: step without gradients", FIRST, "got step() without gradients", 2, f"{_ENGINE}/test_engine.py::test_steps_without_gradients_or_batches_are_refused"),
    Row("Engine: `score` without `read`, for a model that computes no scores", FIRST, "forward has no argument `scores`; ... pass `read` to `score`", 2, f"{_CALLS}::test_scores_of_another_model_need_a_function_that_reads_them"),
    Row("`PreferenceTask` with a transformers model", FIRST, "the model was called with scores='log_probs', and returned ...", 2, "packages/d9d-loop/tests/tasks/test_packed_tasks.py::test_outputs_of_a_model_that_ignores_arguments_are_an_error"),
    Row("Engine: training goes on after a failed call", LATER, "an earlier forward_backward() failed", 2, f"{_CALLS}::test_gradients_of_a_failed_forward_backward_are_not_used"),
    Row("d9d-dist alone: other first values on a rank", BEFORE, "the values of ... differ between the N ranks that would share them", 2, _VALUES),
    Row("d9d-state alone: save of an earlier step", LATER, "got step = 6, but ... has a checkpoint of the later step 12", 2, "packages/d9d-state/tests/checkpoint/test_store.py::test_a_run_goes_back_to_an_earlier_step_after_discarding_the_later_ones"),
    Row("d9d-modules alone: labels outside the vocabulary", FIRST, "got labels from -1 to -1", 2, "packages/d9d-modules/tests/test_chunked_cross_entropy.py::test_labels_outside_of_the_vocabulary_and_missing_labels_raise"),
    Row("d9d-moe alone: counts that do not cover the rows", FIRST, "number of rows and of counted rows", 2, "packages/d9d-moe/tests/test_grouped_linear.py::test_counts_that_do_not_cover_the_rows_raise"),
    Row("d9d-pipeline alone: a loss that is a vector", FIRST, "shape of the loss", 2, "packages/d9d-pipeline/tests/test_executor.py::test_rejects_a_loss_that_is_a_vector"),
    Row("d9d-peft alone: adapter of a layer with two names", LATER, "got adapters of layers with several names: a and b", 2, "packages/d9d-peft/tests/test_lora_of_vocabulary.py::test_a_layer_with_two_names_is_not_stored"),
    Row("d9d-metrics alone: shapes that broadcast", FIRST, "got predictions of shape (...); expected ...", 2, "packages/d9d-metrics/tests/test_samples.py::test_shapes_that_differ_are_an_error"),
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
