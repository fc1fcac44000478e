"""``python -m mars_platform`` is the ``marsray`` command."""

from mars_platform.cli.main import main

main()
