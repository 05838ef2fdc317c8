"""Sharded checkpoints of a run: model, optimizer, position in the data, and random state.

A checkpoint is a folder of safetensors files and a JSON index; neither can carry code. The index
records the offset of every shard in its tensor, so that a run of any layout can load it.
`save` writes a checkpoint, `load` reads one, and `retention` finds the newest and deletes old ones.
"""
