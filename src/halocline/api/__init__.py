"""WHAT A CLIENT SEES: the OpenAI-compatible HTTP surface."""
