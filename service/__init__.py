"""Training between groups that do not wait for each other."""
