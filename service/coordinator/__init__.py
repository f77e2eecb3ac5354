"""The coordinator: orders every commit, and holds no parameters."""
