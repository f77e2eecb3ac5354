"""Proof that a run recovers exactly: certificates, drills, soaks."""
