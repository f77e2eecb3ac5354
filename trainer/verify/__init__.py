"""Proof that a run recovers exactly: certificates, fault drills and soaks."""
