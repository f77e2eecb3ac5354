"""Starts and restarts jobs. Never imports jax; only k8s_manifest.py needs PyYAML."""
