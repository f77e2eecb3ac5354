"""Checkpoints: saving, retention, restoring, inspection. See docs/checkpoints.md."""
