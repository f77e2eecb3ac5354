"""The processes of a job: group, joining, preflight, watchdog, preemption."""
