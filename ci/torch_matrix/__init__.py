"""The collectives on other releases of torch: download them, compile the glue, run every operation."""
