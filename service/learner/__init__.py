"""A learner: one SPMD job that exchanges parameters with the service."""
