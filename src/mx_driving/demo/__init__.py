"""The surround view: cameras, a street, the lift to a view from above, its picture. Nothing here is imported by the package
itself."""
