"""Checkpoints of SMP v2's API, written and read by `nearlinear.save` and `nearlinear.load`."""

from . import state_dict_loader, state_dict_saver, state_dict_utils

__all__ = ["state_dict_loader", "state_dict_saver", "state_dict_utils"]
