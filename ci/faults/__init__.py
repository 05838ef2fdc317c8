"""Chaos lab: inject faults into a training run; its result must equal an undisturbed run's.

    python -m ci.faults                                   # 200 trials of every kind in turn
    python -m ci.faults --trials 12 --only kill,exit      # a short run of some kinds
    python -m ci.faults --write                           # also write packages/core/docs/faults.md

Kinds that need emulated nodes or a memory cgroup are left out, with the reason, where the machine
has none. Every trial injects one fault at a random time into a run of two replicas, waits until the
ranks have ended, checks the cause that they report, and restarts them, as a launcher does. The
table shows the time to detection, the time to recovery and the steps that were lost. After the last
trial the checkpoint is compared bit by bit with that of an undisturbed run.
"""
