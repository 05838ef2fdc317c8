"""Why mutants survive that no test detects."""

_EQUAL_LENGTHS = "equivalent: offsets and shapes of a tensor have equal lengths"

EXPLAINED: dict[tuple[str, str], str] = {
    ("checkpoint/index.py", "off by one: 64 -> (65)"):
        "equivalent: the text that is searched in the first bytes ends before byte 64",
    ("checkpoint/index_schema.py", "constant: True -> (False)"):
        "equivalent: the lengths are compared before",
    ("checkpoint/sealed_json.py", "off by one: 0 -> (1)"):
        "equivalent: a text without brackets holds no object and is refused",
    ("checkpoint/shards.py", "constant: True -> (False) #2"): _EQUAL_LENGTHS,
    ("checkpoint/shards.py", "constant: True -> (False) #3"): _EQUAL_LENGTHS,
    ("checkpoint/shards.py",
     "operator: weight * math.prod(signs) -> (weight // math.prod(signs))"):
        "equivalent: both numbers are 1 or -1",
    ("checkpoint/save.py", "constant: False -> (True) #2"): "equivalent: all callers pass it",
    ("checkpoint/save.py", "constant: True -> (False)"):
        "equivalent: the gathered lists have equal lengths",
    ("context_parallel/ring_attention.py",
     "operator: self.seed + 4 * source + number -> (self.seed + 4 * source - number)"):
        "equivalent: the seeds of all blocks still differ",
    ("data/sampler.py", "off by one: 1 -> (2) #4"):
        "equivalent: numpy infers the length that is given as any negative number",
    ("distributed/mesh.py", "constant: True -> (False)"):
        "equivalent: numpy returns one coordinate per axis",
    ("fsdp/accumulate.py", "constant: True -> (False) #6"):
        "harmless: the hook would be installed again, and the first one raises the error",
    ("fsdp/clip_grad.py", "constant: True -> (False)"):
        "harmless: the hook would be installed again, and a second clip changes nothing",
    ("fsdp/unit_collectives.py", "constant: False -> (True) #1"):
        "equivalent: FSDP2 passes this argument, and the method ignores it",
    ("fsdp/unit_collectives.py", "constant: True -> (False) #3"):
        "equivalent: the lists of a unit have equal lengths",
    ("expert_parallel/routing.py", "constant: True -> (False) #10"):
        "equivalent on CPUs, where torch's sort is stable",
    ("pipeline_parallel/partition.py", "constant: True -> (False) #1"):
        "equivalent: every stage has a start and an end",
    ("pipeline_parallel/partition.py", "off by one: 1.0 -> (2.0) #1"):
        "equivalent: the divisor of costs that are all 0",
    ("pipeline_parallel/stage.py", "operator: hidden * torch.nan -> (hidden // torch.nan)"):
        "equivalent: both are NaN",
    ("planner/step_time.py", "comparison: left_out <= 0 -> (left_out < 0)"):
        "equivalent: zero times the seconds of a micro-batch are added",
    ("tensor_parallel/parallelize.py", "constant: False -> (True)"):
        "equivalent: every config of transformers has the attribute",
}  # fmt: skip
"""Reason by module and `Mutation.key`."""
