"""The race: sharded training by this project beside DeepSpeed and FSDP, on an emulated cluster."""
