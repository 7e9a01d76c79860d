"""Monitoring of runs: finite values, errors, the clock, devices and waiting times."""
