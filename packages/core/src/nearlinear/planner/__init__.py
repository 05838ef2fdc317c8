"""Predict memory, step time, cost and layout of a config, without a cluster.

`api.plan` (``nl.plan``) evaluates one config on one cluster and returns a `result.PlanResult`.
"""
