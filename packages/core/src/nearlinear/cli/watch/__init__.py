"""``nearlinear watch`` in the terminal and ``nearlinear dashboard`` in a browser.

Both only read the files or log lines written by `nearlinear.train.metrics`. They import no torch
and do not communicate with the run.
"""
