"""The surround view: cameras, a street, the lift to a view from above, its picture. The package itself does not
import it."""
