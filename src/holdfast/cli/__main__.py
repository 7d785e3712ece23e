"""`python -m holdfast.cli` is the same as `holdfast`."""

from . import main

main()
