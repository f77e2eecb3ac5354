"""Meshloom. Its parts are imported by name: `meshloom.sharding` needs jax alone.

Nothing is imported here, so that a part never brings the libraries of another.
"""

__version__ = "0.1.0"
