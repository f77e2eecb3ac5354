"""A merger adds up the contributions of learners, and passes on one."""
