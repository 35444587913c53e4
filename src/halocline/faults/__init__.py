"""Faults injected into the real machines: `python -m halocline.faults --seed N`.

A composition root: real schedulers, arenas and exchanges of several workers over a simulated network, and a token
oracle whose page bytes travel, so that a page that is wrong, stale or missing changes a token.
"""
