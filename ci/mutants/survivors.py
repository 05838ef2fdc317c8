"""Why mutants survive that no test detects."""

EXPLAINED: dict[tuple[str, str], str] = {
    ("checkpoint/index_schema.py", "7248:constant:(False)"):
        "the lengths are compared before",
    ("fsdp/accumulate.py", "15913:constant:(False)"):
        "the hook would be installed again; the first one raises the error",
    ("fsdp/unit_collectives.py", "8861:constant:(True)"):
        "the default is never used: FSDP2 passes the argument, and the method ignores it",
    ("checkpoint/index.py", "3312:off by one:(65)"):
        "the key that is searched in the first bytes ends before byte 64",
}  # fmt: skip
"""Reason by module and key of the mutation."""
