"""WHAT TURNS THE CRANK: the step loop, the process boundary, text from tokens, health and metrics.

core        events in, plan, run, apply, updates out
process     the engine's own process: builds scheduler and backend, turns the core until told to stop
client      the other side: submits sequences, yields their tokens, notices the engine's death
front       client + tokenizer: sequences as text, with stop strings; what api and llm use
"""
