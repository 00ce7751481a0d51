"""`python -m sbnet` is the command `sbnet`."""

from sbnet.apps.cli import main

main()
