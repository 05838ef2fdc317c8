"""Kill ranks of a training run repeatedly; the result must equal that of an undisturbed run.

    python -m ci.fault_injection                          # 100 times kill -9, 4 ranks, 10 minutes
    python -m ci.fault_injection --kills 5 --steps 40     # a short run

Kills hit a random rank at a random time, also during saves. A supervisor restarts all ranks, as
torchrun does. After every kill each finished checkpoint is verified. At the end the last checkpoint
is compared with that of the undisturbed run element by element.
"""
