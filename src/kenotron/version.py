"""The version of the package: nothing else holds it, and every module may import it."""

__version__ = "0.1.0.dev0"
