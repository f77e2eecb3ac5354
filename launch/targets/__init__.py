"""Where the processes of a job run: one module per target."""
