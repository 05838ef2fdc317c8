"""How fast training's reader is, beside those that others read tokens with.

    python -m ci.benchmarks.reader --lengths 512 2048
    python -m ci.benchmarks.reader --start             the first batch of ten billion tokens

The same tokens lie as token shards and as an arrow dataset. Readers take turns, a round each, so
that a busy machine is busy for all of them; CPU seconds are counted, and every batch is checked
against the tokens it must hold before anything is timed.
"""
