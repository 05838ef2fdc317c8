"""The words of SageMaker's model parallel libraries that a `config.Config` understands.

Source: the public SMP documentation, versions 1 and 2.
"""

ALIASES = {
    "sharded_data_parallel_degree": "hybrid_shard_degree",
    "offload_activations": "sm_activation_offloading",
    "partitions": "pipeline_parallel_degree",
    "tensor_parallel_seed": "random_seed",
}
"""Names of SMP v1 (and one of the v2 launch notes) for keys of `Config`."""

TUNING_OF_V1 = frozenset(
    "checkpoint_attentions contiguous ddp ddp_dist_backend "
    "ddp_port deterministic_server fast_mode fp16_params horovod load_partition "
    "overlapping_allreduce partition_file sdp_gradient_clipping "
    "sdp_param_persistence_threshold skip_tracing "
    "static_mode _fp32_grad_accumulation _match_weights".split()
)
"""Keys of SMP v1 with no counterpart here: accepted, and logged as having no effect."""

COUNTS_OF_V1 = ("sdp_max_live_parameters", "sdp_reduce_bucket_size")  # of parameters

WORDS = {
    "hierarchical_all_gather": ("auto", "on", "off"),
    "gather_dtype": ("same", "bf16", "fp8"),
    "cp_comm_type": ("p2p", "all_gather"),
    "pipeline": (
        "simple",
        "interleaved",
        "gpipe",
        "1f1b",
        "interleaved_1f1b",
        "looped_bfs",
        "interleaved_zero_bubble",
        "zbv_zero_bubble",
        "dualpipev",
    ),
    "optimize": ("memory", "speed"),
}

OF_DEGREE = {
    "pipeline_parallel_degree": "pipeline virtual_pipeline_degree active_microbatches optimize "
    "memory_weight default_partition",
    "context_parallel_degree": "cp_comm_type",
}
"""Keys that matter only where there are several ranks of a kind."""

OF_FP16 = (
    "init_scale scale_factor scale_window min_scale delayed_shift consecutive_hysteresis".split()
)
"""Keys of the loss scale: SMP's ``dynamic_loss_args``."""

PLACEMENTS = {"cluster": "DPT", "spread": "TPD"}
"""SMP's names of two placements; any order of the three letters is one."""
