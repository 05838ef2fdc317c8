"""Replicas that may be lost: each is a job of its own, and the others complete its steps.

`peers` connects the first ranks of all replicas and notices losses. `membership` makes them agree,
after every step, whether its update is applied and which replicas go on. `replica_sum` adds the
gradients of all replicas in a fixed order, whoever computed them. `transfer` copies the state to a
replica that joins. `job` is the interface of the trainer.
"""
