"""The commands; `app.py` holds them together. Nothing here is imported by the package itself."""
