"""Checks whether this machine is ready to train: see docs/doctor.md."""
