"""The processes of a job: joining, preflight, watchdog, preemption."""
