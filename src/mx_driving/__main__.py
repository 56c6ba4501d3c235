"""`python -m mx_driving` is `mx-driving`."""

from .cli import main

main()
