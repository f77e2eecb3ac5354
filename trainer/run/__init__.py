"""A run: from a config to a trained state, with everything in between."""
