"""Measurements: workloads, rivals, floors, times, reports. The package itself does not import them."""
