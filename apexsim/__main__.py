"""``python -m apexsim``."""

from apexsim.cli import main

main()
