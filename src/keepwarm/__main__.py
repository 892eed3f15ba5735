"""`python -m keepwarm` is the command line."""

from keepwarm.cli.main import main

main()
