"""Names and values of SageMaker's model parallel libraries that `ParallelConfig` accepts.

Source: the public SMP documentation, versions 1 and 2.
"""

ALIASES = {
    "sharded_data_parallel_degree": "hybrid_shard_degree",
    "offload_activations": "sm_activation_offloading",
    "partitions": "pipeline_parallel_degree",
    "tensor_parallel_seed": "random_seed",
}
"""SMP v1 names (and one of the v2 launch notes) for keys of `ParallelConfig`."""

IGNORED_V1_KEYS = frozenset(
    "checkpoint_attentions contiguous ddp ddp_dist_backend "
    "ddp_port deterministic_server fast_mode fp16_params horovod load_partition "
    "overlapping_allreduce partition_file sdp_gradient_clipping "
    "sdp_param_persistence_threshold skip_tracing "
    "static_mode _fp32_grad_accumulation _match_weights".split()
)
"""Keys of SMP v1 without an equivalent: accepted, and logged as having no effect."""

PARAMETER_COUNTS = ("sdp_max_live_parameters", "sdp_reduce_bucket_size")
"""Keys that count parameters and may be written as floats, e.g. 1e9."""

ALLOWED_VALUES = {
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

KEYS_BY_DEGREE = {
    "pipeline_parallel_degree": "pipeline virtual_pipeline_degree active_microbatches optimize "
    "memory_weight default_partition",
    "context_parallel_degree": "cp_comm_type",
}
"""Keys that have an effect only with a degree above 1."""

FP16_KEYS = (
    "init_scale scale_factor scale_window min_scale delayed_shift consecutive_hysteresis".split()
)
"""Keys of the loss scaler, SMP's ``dynamic_loss_args``."""

PLACEMENTS = {"cluster": "DPT", "spread": "TPD"}
"""SMP's names of two placements; any order of the three letters is a placement."""
