"""Saving and loading beside PyTorch's Distributed Checkpoint: the same state, in the same run.

    python -m ci.benchmarks.checkpoint                 # 2 ranks on this machine, about 700 MB
    python -m ci.benchmarks.checkpoint --ranks 4 --width 1024 --folder /fsx/tmp

Ways take turns within a round; medians of the rounds and ratios are printed, and every state that
is loaded is compared with the one that was saved, number by number.
"""
