"""What a call is held to: inputs, limits and data that are asked for, switches, and what this torch can do."""

from . import data, flags, inputs, limits, needs, rules

__all__ = ["data", "flags", "inputs", "limits", "needs", "rules"]
