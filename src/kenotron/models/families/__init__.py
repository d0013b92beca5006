"""The built-in families, one module each, named as the family is. Adding a module here adds a family.

They do not import torch at module level, because their sections belong to the config's schema. Modules that compute are
imported where they are built.
"""
