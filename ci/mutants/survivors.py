"""Why mutants survive that no test detects."""

EXPLAINED: dict[tuple[str, str], str] = {
    ("checkpoint/index_schema.py", "7248:constant:(False)"):
        "the lengths are compared before",
}  # fmt: skip
"""Reason by module and key of the mutation."""
