"""The same code under a fake clock: the shipped scheduler, cache and arena over a cost model instead of a device."""
