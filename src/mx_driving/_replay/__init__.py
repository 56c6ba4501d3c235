"""Judges recorded calls: `mx-driving replay` reads what `mx_driving_portable/record.py` wrote on another machine."""
