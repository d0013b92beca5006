"""Keys of model families for the table of every_key.py: which are refused, and which tests show what the others do."""

REFUSED_KEYS = {
    ("Qwen2Architecture", "is_qwen2_config"): {
        "rope_seq_len_interpolation_factor": 2.0,
        "flex_attention_mask": "document",
        "_use_doc_masking": "true",
        "ring_attn_heads_k_stride": 1,
    },
    ("Starcoder2Architecture", "is_starcoder2_config"): {
        "attn_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "resid_pdrop": 0.1,
        "global_attn_layers": "[1]",
        "use_position_embeddings": "true",
        "use_rotary_embeddings": "false",
        "scale_attn_weights": "false",
        "attention_softmax_in_fp32": "false",
        "scale_attention_softmax_in_fp32": "false",
    },
}
REFUSED = {
    f"{section}.{key}": f"model.model_config={{{marker}: true, {key}: {value}}}"
    for (section, marker), keys in REFUSED_KEYS.items()
    for key, value in keys.items()
}

# Written to exports: what else the config has to say, and the key.
_HEADS = "hidden_size: 16, num_hidden_layers: 1, vocab_size: 64, num_heads: 4, head_dim: 8, n_groups: 2, state_size: 4"
EXPORT_BASE = {
    "NemotronHArchitecture": (
        "model.model_config={is_nemotron_h_config: true, hybrid_override_pattern: '-', "
        "hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1, vocab_size: 64, "
        "intermediate_size: 16}",
    ),
    "Mamba2StyleArchitecture": (f"model.model_config={{is_mamba2_config: true, {_HEADS}}}",),
    "MambaStyleArchitecture": (f"model.model_config={{is_mamba2_config: true, {_HEADS}}}",),
}
EXPORTED = {
    "NemotronHArchitecture.expand": "model.model_config.expand=3",
    "Mamba2StyleArchitecture.chunk_size": "model.model_config.chunk_size=8",
    "MambaStyleArchitecture.rescale_prenorm_residual": "model.model_config.rescale_prenorm_residual=true",
}

VARIANTS, FAMILIES = "test_config_variants.py", "test_families_equal_transformers.py"
ROUTER = "test_mixture_of_experts.py"
TESTS = {
    ("test_doremi.py", "DoReMi"): """domain_names domain_weights ref_model_resume_checkpoint_path step_size
        smoothing_param""",
    ("test_layer_statistics.py", "MetricsLogging"): "log_level log_detail_interval gradient_noise_scale",
    ("test_memory_snapshot.py", "Profiler"): "memory_snapshot_path",
    ("test_trackers.py", "Wandb"): "project entity name tags mode",
    ("test_trackers.py", "Trackio"): "project name space_id",
    ("test_evaluation_of_runs.py", "Evaluation"): """tasks include_path eval_interval num_fewshot limit batch_size
        device ema srun""",
    ("test_headless.py", "Headless"): "name negatives block_size temperature",
    ("test_distillation.py", "Distillation"): "name teacher weight temperature top_k cache",
    ("test_build_optimizer.py", "Lion"): "name lion_beta1 lion_beta2",
    ("test_build_optimizer.py", "Muon"): "muon_scale",
    ("test_build_optimizer.py", "NorMuon"): "name normuon_beta2 adam_eps adam_beta1 adam_beta2 torch_adam_is_fused "
    "muon_momentum muon_nesterov muon_ns_steps muon_learning_rate_scale muon_scale",
    (
        "test_build_optimizer.py",
        "Soap",
    ): """name soap_beta1 soap_beta2 soap_precondition_frequency adam_eps adam_beta1 adam_beta2
        torch_adam_is_fused""",
    ("test_combined.py", "ParamGroup"): "optimizer_factory learning_rate_scheduler",
    ("test_combined.py", "Optimizer"): "ema_decay",
    (VARIANTS, "DecoderArchitecture"): "family",
    (VARIANTS, "GPTNeoXArchitecture"): "family is_gpt_neox_config",
    (FAMILIES, "GPTNeoXArchitecture"): "hidden_act layer_norm_eps attention_bias use_parallel_residual rotary_pct",
    (VARIANTS, "LlamaArchitecture"): "family",
    (VARIANTS, "MistralArchitecture"): "family is_mistral_config",
    (FAMILIES, "MistralArchitecture"): "sliding_window",
    (VARIANTS, "MixtralArchitecture"): "family is_mixtral_config",
    (VARIANTS, "OlmoeArchitecture"): "family is_olmoe_config",
    (VARIANTS, "Qwen2MoeArchitecture"): "family is_qwen2_moe_config",
    (VARIANTS, "Qwen3MoeArchitecture"): "family is_qwen3_moe_config",
    (ROUTER, "MixtureArchitecture"): """num_experts_per_tok router_aux_loss_coef router_z_loss_coef
        router_aux_loss_scope moe_expert_capacity_factor""",
    (ROUTER, "MixtralArchitecture"): "num_local_experts sliding_window",
    (ROUTER, "OlmoeArchitecture"): """attention_bias num_experts num_experts_per_tok norm_topk_prob
        router_aux_loss_coef""",
    (ROUTER, "QwenSparseArchitecture"): """num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob
        decoder_sparse_step mlp_only_layers""",
    (ROUTER, "Qwen2MoeArchitecture"): "qkv_bias shared_expert_intermediate_size",
    (ROUTER, "Qwen3MoeArchitecture"): "attention_bias num_experts num_experts_per_tok moe_intermediate_size",
    (VARIANTS, "Olmo2Architecture"): "family is_olmo2_config",
    (FAMILIES, "Olmo2Architecture"): "attention_bias",
    (VARIANTS, "Qwen2Architecture"): """family is_qwen2_config pretraining_tp log_attn_probs _fused_rotary_emb
        _fused_rms_norm _use_qkv_packed""",
    (FAMILIES, "Qwen2Architecture"): "attention_bias no_rope_layer",
    (VARIANTS, "DeepseekV3Architecture"): "family is_deepseek_v3_config",
    (ROUTER, "DeepseekV3Architecture"): """n_routed_experts num_experts_per_tok n_shared_experts moe_intermediate_size
        n_group topk_group routed_scaling_factor first_k_dense_replace router_aux_loss_coef
        attention_bias kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim""",
    ("test_true_shapes.py", "DeepseekV3Architecture"): "q_lora_rank",
    ("test_conversion.py", "DeepseekV3Architecture"): "rope_interleave",
    ("test_next_tokens.py", "DeepseekV3Architecture"): "num_nextn_predict_layers next_token_loss_weight",
    (ROUTER, "BiasedMixtureArchitecture"): """n_group topk_group norm_topk_prob routed_scaling_factor
        router_bias_update_rate""",
    (ROUTER, "Qwen2Architecture"): "moe_config sliding_window_size",
    (ROUTER, "NanotronExperts"): """num_experts top_k moe_intermediate_size enable_shared_expert layers
        shared_expert_intermediate_size router_aux_loss_coef token_dispatcher_type""",
    (VARIANTS, "LlamoeArchitecture"): "family is_llamoe_config hidden_act moe_capacity_factor pretraining_tp",
    (ROUTER, "LlamoeArchitecture"): "moe_num_experts num_experts_per_tok router_aux_loss_coef",
    (VARIANTS, "NanoArchitecture"): "family",
    (FAMILIES, "NanoArchitecture"): "hidden_act value_embeddings final_logit_softcapping",
    (VARIANTS, "Qwen3Architecture"): "family is_qwen3_config",
    (FAMILIES, "Qwen3Architecture"): "attention_bias",
    (VARIANTS, "SmolLM3Architecture"): "family is_smollm3_config",
    (FAMILIES, "SmolLM3Architecture"): "attention_bias no_rope_layers no_rope_layer_interval",
    (VARIANTS, "Starcoder2Architecture"): """
        family is_starcoder2_config bos_token_id eos_token_id hidden_act hidden_size intermediate_size
        max_position_embeddings num_attention_heads num_hidden_layers num_key_value_heads tie_word_embeddings
        vocab_size grouped_query multi_query""",
    (FAMILIES, "Starcoder2Architecture"): "use_bias norm_epsilon sliding_window",
    ("test_mamba.py", "MambaStyleArchitecture"): """expand conv_kernel residual_in_fp32 layer_norm_epsilon use_bias
        use_conv_bias time_step_min time_step_max time_step_floor hidden_act""",
    ("test_mamba.py", "MambaArchitecture"): """is_mamba_config state_size time_step_rank time_step_scale
        time_step_init_scheme family tie_word_embeddings""",
    ("test_mamba.py", "Mamba2Architecture"): """is_mamba2_config num_heads head_dim state_size time_step_limit
        family""",
    ("test_mamba.py", "Mamba2StyleArchitecture"): "n_groups",
    ("test_parametrization.py", "SpectralInit"): "use_mup mup_factors",
    ("test_parametrization.py", "Model"): "parametrization",
    ("test_parametrization.py", "Parametrization"): "kind base_width base_depth",
    (VARIANTS, "NemotronHArchitecture"): "family is_nemotron_h_config",
    (FAMILIES, "NemotronHArchitecture"): "hidden_act",
    ("test_hybrids.py", "NemotronHArchitecture"): """hybrid_override_pattern num_hidden_layers time_step_min
        tie_word_embeddings residual_in_fp32 mamba_num_heads mamba_head_dim ssm_state_size head_dim
        mlp_bias n_routed_experts moe_intermediate_size moe_shared_expert_intermediate_size""",
}
OWN = {f"{section}.{key}": test for (test, section), keys in TESTS.items() for key in keys.split()}
