"""A run as it goes: `nearlinear watch` in the terminal, `nearlinear dashboard` in a browser.

Reads what `train.report` writes, files or a log's lines, and nothing else: no torch, and no word
with the run, which does not notice.
"""
