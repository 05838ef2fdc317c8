"""Attention modules for models of Hugging Face."""

from . import llama_flashattn

__all__ = ["llama_flashattn"]
