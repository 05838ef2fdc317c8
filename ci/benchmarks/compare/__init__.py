"""Compare sharded training by nearlinear, DeepSpeed and FSDP on an emulated cluster."""
