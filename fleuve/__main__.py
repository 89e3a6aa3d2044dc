"""`python -m fleuve`."""

from fleuve.cli import main

main()
