"""What offloaded activations cost in time and save in memory: ``python -m ci.benchmarks.offload``.

Forward and backward passes of GPT-2 blocks whose activations are recomputed, their inputs kept on
the device, offloaded with a loading horizon, and offloaded by PyTorch's ``save_on_cpu``. The shape
is that of the published 30-billion-parameter runs: width 7168, 64 heads, 2048 tokens, bfloat16.
"""
