"""``nearlinear tune``: measure a job's links and choose the settings of its communication.

`measure` times the collectives of the real unit sizes, `work` what a rank computes and holds,
`memory` what is free; `estimate` and `choose` are arithmetic on those numbers; `report` shows them.
"""
