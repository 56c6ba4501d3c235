"""The surround view: cameras, a street, the lift to a view from above, its picture."""
