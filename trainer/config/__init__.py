"""Configs: gin files to trees of dataclasses, and back. See docs/config.md."""
