"""Judge recorded calls: `mx-driving replay` reads the files that `mx_driving_portable/record.py` wrote on another machine."""
