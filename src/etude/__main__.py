"""`python -m etude`: the same as the `etude` command, for torchrun."""

from etude.cli.main import main

main()
