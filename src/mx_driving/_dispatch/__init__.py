"""What makes the operators at home in PyTorch. Importing this room registers them."""

from . import decompositions, distributed, flops, functions, library, transforms

__all__ = ["decompositions", "distributed", "flops", "functions", "library", "transforms"]
