"""Where the memory of a training step went: what is saved, what is held, and what a knob would do.

`measure` counts bytes in one step, `report` is what came out, `savings` estimates the alternatives;
`states` says what a config comes to before anything runs.
"""
