"""Prefill here, decode there: what two workers say to each other, and the ways over which pages travel."""
