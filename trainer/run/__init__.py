"""A run: from a config to a trained state, and all that happens on the way."""
