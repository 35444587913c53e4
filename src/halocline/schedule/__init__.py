"""WHO RUNS NEXT, AND HOW FAR: a function of events, pure like memory."""
