"""Code that the trainer, the server and the autoscaler share; it imports none of them."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("marsray")
except PackageNotFoundError:  # the packages are on the path but not installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
