"""The plans that fit a target, found and ranked: see docs/search.md."""
