"""Hugging Face folders: safetensors files and a config.json, as `transformers` reads and writes.

`export` writes a folder from a run or a checkpoint, and `importing` loads a folder into a model of
any layout. `naming` maps tensors of the model to tensors of a folder. No rank holds a whole model,
and no code of a folder is run.
"""
