"""What is checked at a call: inputs, on request limits and data, switches, and what this torch can do."""

from . import data, flags, inputs, limits, needs, rules

__all__ = ["data", "flags", "inputs", "limits", "needs", "rules"]
