"""`python -m mx_driving` runs the command `mx-driving`."""

from mx_driving_portable.command import main

main()
