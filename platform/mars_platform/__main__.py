"""``python -m mars_platform`` is the ``marsray`` command."""

from mars_platform.cli import main

main()
