"""The built-in families, one module each, named as the family is. Adding a module here adds a family.

They import no torch at module level: their sections are part of the config's schema. What computes is imported where
it is built.
"""
