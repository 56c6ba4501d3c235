"""`python -m mx_driving` is `mx-driving`."""

from mx_driving_portable.command import main

main()
