"""`python -m sbnet` is the command `sbnet`."""

from sbnet_command.cli import main

main()
