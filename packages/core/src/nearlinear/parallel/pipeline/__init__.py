"""Pipeline parallelism: the layers of an untouched model on several ranks, stage behind stage.

`pipeline` makes a rank's model its stages of the whole (`parts`, `partition`, `stage`), which
`nearlinear.shard` then shards; `engine` runs them on the schedules of
``torch.distributed.pipelining``. `step` is SMP's way to write the same.
"""
