"""The modules that families share, one idea per file."""
