"""Ranks that watch over each other, so that a dead or hung one is named instead of waited for.

Every rank says once a second, through the store by which the job's ranks found each other, what it
is doing and for how long (`beat`); rank 0 judges by that (`judge`), and one `Alarm` ends the run
everywhere. A thread does it (`dog`): no collective, nothing that waits for an accelerator.
"""
