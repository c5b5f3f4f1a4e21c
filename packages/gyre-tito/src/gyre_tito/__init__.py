"""Token-in-token-out recording proxy, trajectory tree and store."""
