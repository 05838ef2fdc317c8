"""Activations that do not fit: recomputed in the backward pass, or kept in host memory until then.

`door` has the public functions; `strategy` what can be asked for; `front` stands before each block
and sends its calls through `recompute`, `regions`, `selective` or `budget`, and around them through
`offload`, which moves what is saved by a copier (`copies`) to a slab of host memory (`slab`).
"""
