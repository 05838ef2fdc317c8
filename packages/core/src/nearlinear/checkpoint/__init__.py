"""What a run cannot lose: its model, optimizer, data position and random state, in one folder.

A checkpoint is safetensors files and a JSON index, nothing that can run code. Pieces of tensors lie
where the ranks that held them put them, with their place in the whole, so that any other layout
reads the same checkpoint: `save` writes one, `load` reads one, `kept` finds and keeps the newest.
"""
