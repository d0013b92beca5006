"""The version of the package, in a separate module that every module may import."""

__version__ = "0.1.0.dev0"
