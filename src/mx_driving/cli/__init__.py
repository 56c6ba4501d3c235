"""The commands; `app.py` collects them. `import mx_driving` imports none of them."""
