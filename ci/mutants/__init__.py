"""Mutation testing: change core modules in small ways; their tests must fail.

    python -m ci.mutants                                 # 12 mutants of each module
    python -m ci.mutants --only request_checks --count 40
    python -m ci.mutants --write                         # writes packages/core/docs/mutants.md

Every mutant runs in a copy of the repository. Results are appended to a file, so that a run that is
interrupted continues. A mutant runs again if its module changes, and a survivor also if tests do.
"""
