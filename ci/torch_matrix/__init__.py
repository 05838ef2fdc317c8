"""The collectives on other releases of torch: download, compile the glue, run every operation."""
