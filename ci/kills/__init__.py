"""A run that is killed again and again, and must come to the very numbers of one that was not.

    python -m ci.kills                          # 100 times kill -9, 4 ranks; about ten minutes
    python -m ci.kills --kills 5 --steps 40     # a quick look

Any rank, at any moment, while it saves, too; a supervisor starts all ranks again, as torchrun does.
After every kill each finished checkpoint is verified, and at the end the last one is compared to
that of a run that nobody disturbed, number by number.
"""
