"""Measurements of the commands: workloads, plain torch, times and errors."""
