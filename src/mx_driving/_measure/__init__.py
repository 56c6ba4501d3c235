"""What commands measure: workloads, plain torch, times, error bounds."""
