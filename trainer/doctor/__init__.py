"""Is this machine fit to train? See docs/doctor.md."""
