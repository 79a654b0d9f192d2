"""Names of settings in other trainers (transformers, TRL, Lightning, Megatron, torchtune), by our key."""

_NAMES = {
    "steps": "max_steps num_steps total_steps train_steps num_training_steps train_iters max_iters iterations",
    "epochs": "num_train_epochs num_epochs max_epochs epoch n_epochs",
    "batch.global_size": "batch_size global_batch_size train_batch_size total_batch_size batch",
    "batch.microbatch_size": (
        "per_device_train_batch_size per_device_batch_size per_gpu_train_batch_size micro_batch_size microbatch_size "
        "train_micro_batch_size_per_gpu gradient_accumulation_steps accumulate_grad_batches grad_accum grad_accum_steps"
    ),
    "seed": "data_seed random_seed manual_seed",
    "run.folder": "output_dir out_dir save_dir default_root_dir logging_dir log_dir checkpoint_dir",
    "run.name": "run_name experiment_name exp_name resume resume_from_checkpoint",
    "run.from_scratch": "overwrite_output_dir",
    "mesh.tensor_parallel": "tensor_model_parallel_size tensor_parallel_size tensor_parallel_degree tp_size tp",
    "mesh.pipeline_parallel": "pipeline_model_parallel_size pipeline_parallel_size pipeline_parallel_degree pp_size pp",
    "mesh.context_parallel_shard": "context_parallel_size context_parallel_degree cp_size cp",
    "mesh.expert_parallel": "expert_model_parallel_size expert_parallel_size expert_parallel_degree ep_size ep",
    "mesh.data_parallel_shard": "fsdp fsdp_size data_parallel_size dp_size dp",
    "precision": "bf16 fp16 amp mixed_precision dtype torch_dtype",
    "data.num_workers": "dataloader_num_workers num_workers workers",
    "data.prefetch": "dataloader_prefetch_factor prefetch_factor",
    "optimizer.kind": "optim optim_type optimizer_type optimizer_name",
    "optimizer.learning_rate": "lr learning_rate max_lr base_lr peak_lr",
    "optimizer.weight_decay": "weight_decay wd decay",
    "optimizer.betas": "betas beta1 beta2 adam_beta1 adam_beta2",
    "optimizer.eps": "eps epsilon adam_epsilon adam_eps",
    "optimizer.momentum": "momentum sgd_momentum",
    "lr_schedule.kind": "lr_scheduler_type lr_scheduler scheduler lr_decay_style lr_schedule_type",
    "lr_schedule.warmup_steps": "warmup_steps num_warmup_steps warmup_ratio warmup_iters lr_warmup_iters warmup",
    "lr_schedule.final_fraction": "min_lr min_lr_ratio lr_end",
    "gradients.max_norm": (
        "max_grad_norm clip_grad clip_grad_norm grad_clip grad_norm_clip gradient_clip_val gradient_clipping "
        "gradient_clip max_norm"
    ),
    "checkpoint.every": "save_steps save_interval save_every checkpoint_interval checkpoint_every save_strategy",
    "checkpoint.keep_last": "save_total_limit max_checkpoints keep_last_n",
    "checkpoint.keep_best": "load_best_model_at_end",
    "evaluation.every": "eval_steps eval_interval eval_every val_check_interval evaluation_strategy eval_strategy",
    "evaluation.num_samples": "max_eval_samples eval_iters limit_val_batches",
    "logging.every": "logging_steps log_every_n_steps log_interval log_every",
    "logging.progress": "disable_tqdm enable_progress_bar",
    "trackers": "report_to logger tracker wandb",
    "initial_weights": "model_name_or_path pretrained init_from",
    "compile": "torch_compile",
    "resilience.timeouts.startup_seconds": "ddp_timeout timeout",
    "dataset.length": "max_seq_length max_length seq_length seq_len block_size cutoff_len",
    "dataset.files": "train_file dataset_name data_path",
    "adapter.rank": "lora_r lora_rank r",
    "adapter.alpha": "lora_alpha",
    "adapter.dropout": "lora_dropout",
    "adapter.target": "target_modules lora_target_modules",
}

OTHER_NAMES = {other: ours for ours, others in _NAMES.items() for other in others.split()}
"""Our dotted key for the name of a setting in another trainer. A configuration class may lack the key."""
