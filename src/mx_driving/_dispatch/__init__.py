"""How torch reaches a kernel. Importing this room registers the operators."""

from . import choose, decompositions, distributed, flops, functions, registered

__all__ = ["choose", "decompositions", "distributed", "flops", "functions", "registered"]
