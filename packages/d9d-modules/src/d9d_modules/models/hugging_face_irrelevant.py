"""Entries of a Hugging Face `config.json` that do not change what a decoder computes, each with the reason."""

from collections.abc import Mapping

_REASONS = {
    "says who wrote the file, and where it came from": (
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "auto_map",
        "name_or_path",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
    ),
    "the model's dtype is chosen where the model is built": ("dtype", "torch_dtype"),
    "names a kernel or the form of the output, not the result": (
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_experts_implementation",
        "attn_implementation",
        "chunk_size_feed_forward",
        "experts_implementation",
        "output_attentions",
        "output_hidden_states",
        "pretraining_tp",
        "return_dict",
        "torchscript",
        "use_cache",
    ),
    "a special token for tokenizers and generation; the weight of padding is trained as any other": (
        "bos_token_id",
        "decoder_start_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
    ),
    "a setting of generation, which transformers reads from generation_config.json": (
        "bad_words_ids",
        "begin_suppress_tokens",
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
    "describes the head of a classifier, which the caller builds": (
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
"""Reason by entry, of the entries that every family may have."""

QWEN3_IRRELEVANT: Mapping[str, str] = IRRELEVANT
"""Those of Qwen3."""

LLAMA3_IRRELEVANT: Mapping[str, str] = IRRELEVANT
"""Those of Llama 3."""
