"""Faults on real processes, against a run without: see docs/recovery.md."""
