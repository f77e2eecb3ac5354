"""Searches for settings: many runs, each an ordinary run folder."""
