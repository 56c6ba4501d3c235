"""What every program of ours needs, commands and examples alike: failures in a sentence, places to write to, tables. Nothing
here is imported by the package itself."""
