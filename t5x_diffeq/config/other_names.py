"""What keys and flags are called in other projects; docs/configuring.md has a table for readers.

The projects are nanoGPT, nanochat, transformers, MaxText, levanter and torchtitan.
"""

_NAMES = {
    "--workdir": "output_dir out_dir outdir base_output_directory run_name model_tag dump_folder "
    "log_dir logdir save_dir checkpoint_dir ckpt_dir ckpt_path workdirs resume_from_checkpoint "
    "resume workdir output model",
    "--input": "model model_path hf_path",
    "--branch_from": "resume_from from_checkpoint load_from",
    "--quiet": "q silent",
    "--config": "c config_file cfg conf",
    "--num_steps": "depth depths n_steps",
    "--rounds": "steps iterations repeats",
    "--workers": "num_proc num_workers",
    "--temperature=0": "greedy",
    "--max_tokens": "max_new_tokens max_length num_tokens length n_tokens",
    "--prompt": "question start text input_text prompts input",
    "--checkpoint": "ckpt step load_step checkpoint_step",
    "init_from": "branch_from load_parameters_path model_name_or_path pretrained from_pretrained",
    "seed": "init_weights_seed data_shuffle_seed data_seed random_seed rng_seed shuffle_seed",
    "model.architecture": "decoder_block model_type flavor model_name",
    "model.block": "decoder_block",
    "model.num_steps": "num_layers n_layers n_layer layers num_hidden_layers depth "
    "base_num_decoder_layers num_decoder_layers num_blocks n_blocks",
    "model.embed_dim": "hidden_size hidden_dim n_embd d_model dim emb_dim base_emb_dim width "
    "model_dim embedding_dim embed_size",
    "model.num_heads": "n_head n_heads heads num_attention_heads num_query_heads "
    "base_num_query_heads",
    "model.num_kv_heads": "num_key_value_heads base_num_kv_heads n_kv_heads n_kv_head kv_heads",
    "model.mlp_dim": "intermediate_size intermediate_dim base_mlp_dim d_ff ffn_dim ff_dim n_inner "
    "mlp_size",
    "model.adapter_rank": "lora_rank lora_r",
    "model.activation": "hidden_act mlp_activations activation_function act_fn",
    "model.rope_theta": "rope_max_timescale theta",
    "model.norm_eps": "rms_norm_eps layer_norm_eps layer_norm_epsilon normalization_layer_epsilon",
    "model.tied_head": "logits_via_embedding tie_word_embeddings enable_weight_tying",
    "model.dropout_rate": "dropout dropout_prob hidden_dropout_prob resid_pdrop embd_pdrop "
    "attention_dropout attn_pdrop",
    "model.qkv_bias": "bias attention_bias",
    "model.dtype": "bf16 fp16 mixed_precision mp precision mixed_precision_param torch_dtype",
    "model.remat": "remat_policy gradient_checkpointing activation_checkpoint checkpointing",
    "model.attention": "attn_implementation flash_attention use_flash_attention attn_impl",
    "model.scheme": "solver integrator method",
    "model.step_size": "dt",
    "data.source": "dataset_type dataset streaming dataset_name train_dataset hf_path",
    "data.path": "input dataset_path hf_path grain_train_files data_path input_bin train_file "
    "train_files files",
    "data.sequence_length": "block_size seq_len seq_length max_seq_len max_seq_length context_size "
    "context_length max_target_length max_position_embeddings n_ctx n_positions max_length ctx_len",
    "data.tokenizer": "tokenizer_type tokenizer_path tokenizer_name processing_class vocab",
    "data.packing": "grain_packing_type pack",
    "data.read_threads": "dataloader_num_workers num_workers workers grain_worker_count",
    "train.total_steps": "steps max_steps max_iters num_iterations num_train_steps num_steps_total "
    "epochs num_epochs num_train_epochs max_epochs n_epochs num_epoch iterations iters total_iters",
    "train.batch_size": "per_device_batch_size per_device_train_batch_size total_batch_size "
    "train_batch_size global_batch_size local_batch_size bs batch",
    "train.microbatches": "gradient_accumulation_steps grad_accum grad_accum_steps "
    "device_batch_size accumulate_grad_batches per_device_parallelism",
    "train.eval_batch_size": "per_device_eval_batch_size",
    "train.eval_every": "eval_interval eval_steps steps_per_eval eval_freq evaluation_strategy "
    "val_every val_check_interval",
    "train.eval_batches": "eval_iters eval_steps eval_tokens max_eval_batches",
    "train.checkpoint_every": "checkpoint_period save_steps save_every save_interval save_strategy "
    "interval checkpoint_interval",
    "train.keep_checkpoints": "max_num_checkpoints_to_keep save_total_limit keep_latest_k "
    "max_to_keep",
    "train.log_every": "log_interval logging_steps log_period log_freq logging_strategy",
    "train.on_spike": "skip_step_on_spikes",
    "train.trackers": "enable_wandb report_to run wandb wandb_log wandb_project wandb_run_name "
    "use_wandb enable_tensorboard tracker tensorboard",
    "train.ema_decay": "ema ema_model",
    "optimizer.name": "opt_type optim optimizer_name optimizer_type",
    "optimizer.learning_rate": "lr max_lr peak_lr matrix_lr embedding_lr unembedding_lr "
    "base_learning_rate",
    "optimizer.beta1": "adam_beta1 adam_b1 b1 betas",
    "optimizer.beta2": "adam_beta2 adam_b2 b2 betas",
    "optimizer.epsilon": "adam_epsilon adam_eps eps",
    "optimizer.weight_decay": "adam_weight_decay wd",
    "optimizer.schedule": "lr_schedule_type lr_scheduler_type lr_schedule scheduler decay_lr",
    "optimizer.warmup_fraction": "warmup_steps_fraction warmup_steps warmup_iters warmup_ratio "
    "warmup num_warmup_steps",
    "optimizer.cooldown_steps": "wsd_decay_steps_fraction lr_scheduler_kwargs warmdown_ratio "
    "lr_decay_iters decay_steps",
    "optimizer.end_lr_fraction": "min_lr min_lr_ratio learning_rate_final_fraction "
    "cosine_learning_rate_final_fraction final_lr_frac",
    "optimizer.max_grad_norm": "gradient_clipping_threshold grad_clip clip clip_norm gradient_clip "
    "max_norm gradient_clip_val clip_grad_norm",
    "mesh.data": "data_parallelism dcn_data_parallelism ici_data_parallelism parallelism_config "
    "data_parallel_replicate_degree dp num_gpus gpus devices n_gpu num_devices",
    "mesh.fsdp": "ici_fsdp_parallelism dcn_fsdp_parallelism data_parallel_shard_degree fsdp_size",
    "mesh.tensor": "ici_tensor_parallelism dcn_tensor_parallelism tensor_parallel_degree tp "
    "tensor_parallel_size",
    "mesh.context": "ici_context_parallelism context_parallel_degree parallelism_config cp",
    "JAX_PLATFORMS=cpu, cuda or tpu in the environment": "device accelerator platform hardware "
    "backend no_cuda use_cpu cpu",
}
OTHER_NAMES: dict[str, list[str]] = {}
for _key, _names in _NAMES.items():
    for _name in _names.split():
        OTHER_NAMES.setdefault(_name, []).append(_key)
