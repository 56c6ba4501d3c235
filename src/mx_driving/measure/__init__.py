"""What is measured and how: workloads, rivals, floors, times, reports. Nothing here is imported by the package itself."""
