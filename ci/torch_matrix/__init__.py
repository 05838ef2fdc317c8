"""Test both packages on other releases of torch and Python: install, compile the glue, train."""
