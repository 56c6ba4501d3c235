"""The command line; `app.py` holds it together. Nothing here is imported by the package itself."""
