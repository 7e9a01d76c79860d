"""Looks at what runs: finite values, errors, the clock, devices, who waits for whom."""
