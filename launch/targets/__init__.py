"""Where the processes of a job run: one module a target."""
