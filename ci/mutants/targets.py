"""Modules that are mutated, and the tests that must detect it, the most specific ones first."""

SOURCE, TESTS = "packages/core/src/nearlinear", "tests/core"

TARGETS: dict[str, list[str]] = {
    "fsdp/accumulate.py": ["fsdp/test_accumulate.py", "fsdp/test_unfinished_accumulation.py"],
    "fsdp/unit_collectives.py": ["fsdp/test_inflight_reductions.py", "fsdp/test_accumulate.py",
                                 "fsdp/test_overlap.py"],
    "fsdp/optimizer_state.py": ["fsdp/test_optimizer_state.py", "fsdp/test_offload_optimizer.py"],
    "fsdp/clip_grad.py": ["fsdp/test_clip_grad.py"],
    "checkpoint/index_schema.py": ["checkpoint/test_damage.py"],
    "checkpoint/index.py": ["checkpoint/test_damage.py", "checkpoint/test_save_and_load.py"],
    "checkpoint/shards.py": ["checkpoint/test_damage.py", "checkpoint/test_layouts.py",
                             "checkpoint/test_save_and_load.py"],
    "checkpoint/sealed_json.py": ["checkpoint/test_damage.py"],
    "checkpoint/load.py": ["checkpoint/test_save_and_load.py", "checkpoint/test_damage.py"],
    "checkpoint/resume.py": ["checkpoint/test_damage.py"],
    "checkpoint/save.py": ["checkpoint/test_save_and_load.py", "checkpoint/test_async_writer.py"],
    "data/sampler.py": ["data/test_data_loader.py", "data/test_data_shuffle.py"],
    "planner/block_time.py": ["planner/test_block_time.py", "planner/test_step_time.py"],
    "planner/step_time.py": ["planner/test_step_time.py", "planner/test_published.py"],
    "launch/sagemaker/request_checks.py": ["launch/test_validation.py"],
    "distributed/mesh.py": ["distributed/test_mesh.py", "distributed/test_mesh_axes.py"],
    "tensor_parallel/loss.py": ["tensor_parallel/test_loss.py"],
    "tensor_parallel/parallelize.py": ["tensor_parallel/test_transform.py"],
    "context_parallel/ring_attention.py": ["context_parallel/test_ring_attention.py"],
    "context_parallel/batch.py": ["context_parallel/test_context_batch.py"],
    "expert_parallel/routing.py": ["expert_parallel/test_expert_routing.py",
                                   "expert_parallel/test_expert_losses.py"],
    "pipeline_parallel/partition.py": ["pipeline_parallel/test_pipeline_partition.py"],
    "pipeline_parallel/stage.py": ["pipeline_parallel/test_pipeline_stage.py",
                                   "pipeline_parallel/test_pipeline.py"],
}  # fmt: skip
