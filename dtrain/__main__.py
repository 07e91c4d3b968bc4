"""`python -m dtrain`."""

from dtrain.cli.main import main

main()
