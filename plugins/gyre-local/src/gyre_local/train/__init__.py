"""The embedded trainer: gradient contributions, the optimizer step, checkpoints."""
