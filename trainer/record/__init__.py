"""Records of a run: metrics, ledger, progress, and the run folder."""
