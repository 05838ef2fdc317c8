"""Pipeline parallelism: divide the layers of an unmodified model into stages on several ranks.

`api.pipeline` reduces a rank's model to its stages (`stage`, `partition`), and ``nearlinear.shard``
shards each of them. `runtime` executes the stages with the schedules of
``torch.distributed.pipelining`` (`schedules`).
"""
