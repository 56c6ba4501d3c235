"""`python -m mx_driving` is `mx-driving`."""

from .cli.app import main

main()
