"""ONE ADDRESS BEFORE MANY WORKERS: which worker gets a request, who is alive, what is tried again, and the passing on.

affinity, book, choice, retry, hold, settings are pure; relay, probe, app, metrics do the I/O around them.
"""
