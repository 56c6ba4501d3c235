"""The path of a call from torch to a kernel. Importing this package registers the operators."""

from . import decompositions, distributed, flops, functions, registered

__all__ = ["decompositions", "distributed", "flops", "functions", "registered"]
