"""The built-in families, one module each, named as the family is. A module that is put here is a family that is served.

They import no torch at module level: their sections are part of the config's schema. What computes is imported where
it is built.
"""
