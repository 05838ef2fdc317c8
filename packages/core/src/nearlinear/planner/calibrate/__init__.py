"""Measure the machine of a job (``nearlinear tune``), for predictions by the planner.

`rates` times compute, memory and copies of a rank; `collectives` times collectives and the slowdown
of concurrent compute; `machine` writes both as a node that the planner reads; `settings` lets the
planner choose communication settings for it.
"""
