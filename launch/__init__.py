"""Starting jobs and bringing them back. Standard library only, never jax."""
