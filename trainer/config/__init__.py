"""Loads gin files into trees of dataclasses and writes them. See docs/config.md."""
