"""What a run writes down: metrics, ledger, progress, and its folder."""
