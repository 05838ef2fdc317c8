"""Test the collectives on other torch releases: install, compile the glue, run all operations."""
