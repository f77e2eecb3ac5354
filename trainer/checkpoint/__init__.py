"""Checkpoints: saved, kept, restored, inspected. See docs/checkpoints.md."""
