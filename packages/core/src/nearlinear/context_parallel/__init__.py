"""Context parallelism: split every sequence over the ranks of a group."""
