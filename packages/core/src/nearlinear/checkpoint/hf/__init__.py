"""Hugging Face folders: safetensors and a config.json, which `transformers` reads and writes.

`export` writes one from a run or a checkpoint, `importing` reads one into a model of any layout;
`naming` knows what a model's tensors are called there. No rank holds a whole model, and no file
can run code.
"""
