"""How torch reaches a kernel. Importing this room registers the operators."""

from .._operator import decompositions
from . import choose, distributed, flops, functions, registered

__all__ = ["choose", "decompositions", "distributed", "flops", "functions", "registered"]
