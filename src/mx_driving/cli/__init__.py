"""The commands; `app.py` collects them. The package itself does not import them."""
