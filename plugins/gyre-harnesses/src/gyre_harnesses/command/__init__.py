"""The harness `command`: any agent program, started in the sandbox, with the model's address in its environment."""
