"""WHO OWNS WHICH BYTES: retention, layout, pools, demand, budget, audit. Pure: no torch, clock, randomness or I/O."""
