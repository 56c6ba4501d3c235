"""Helpers of all our programs, commands and examples alike: failures in a sentence, places to write to, tables. The package
itself does not import them."""
