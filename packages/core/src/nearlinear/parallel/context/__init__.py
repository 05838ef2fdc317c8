"""Context parallelism: every sequence is split among the ranks of a group."""
