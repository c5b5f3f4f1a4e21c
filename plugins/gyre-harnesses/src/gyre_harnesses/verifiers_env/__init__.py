"""Environments of the package verifiers: their tasks, their agents, their rewards."""
