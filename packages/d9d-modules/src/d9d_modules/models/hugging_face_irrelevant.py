"""Entries of a Hugging Face `config.json` that do not affect a decoder, with the reasons."""

from collections.abc import Mapping

SPECIAL_TOKENS = (
    "bos_token_id",
    "cls_token_id",
    "decoder_start_token_id",
    "eos_token_id",
    "pad_token_id",
    "sep_token_id",
)
"""Entries about special tokens, which an export repeats."""

_REASONS = {
    "provenance of the file": (
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "auto_map",
        "name_or_path",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
    ),
    "the caller sets the model's dtype": ("dtype", "torch_dtype"),
    "selects a kernel or the output format, which does not change the result": (
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_experts_implementation",
        "attn_implementation",
        "chunk_size_feed_forward",
        "deterministic_flash_attn",
        "experts_implementation",
        "output_attentions",
        "output_hidden_states",
        "pretraining_tp",
        "reference_compile",
        "repad_logits_with_grad",
        "return_dict",
        "sparse_pred_ignore_index",
        "sparse_prediction",
        "torchscript",
        "use_cache",
    ),
    "a special token of tokenizer and generation; the padding embedding is trained like any other": SPECIAL_TOKENS,
    "a generation setting, which transformers reads from generation_config.json": (
        "bad_words_ids",
        "begin_suppress_tokens",
        "cache_implementation",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "epsilon_cutoff",
        "eta_cutoff",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_scores",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict_in_generate",
        "suppress_tokens",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
    ),
    "describes the classification head, which the caller builds": (
        "classifier_dropout",
        "finetuning_task",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "task_specific_params",
    ),
}

IRRELEVANT: Mapping[str, str] = {key: reason for reason, keys in _REASONS.items() for key in keys}
"""Irrelevant entries of all families, with the reason of each."""
