"""Typed configuration: parallelism, model shapes and the schema that reads files into them."""
