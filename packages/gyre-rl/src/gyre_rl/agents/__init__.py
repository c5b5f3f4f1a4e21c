"""The process where agents work and are judged: harness, sandbox and scorers."""
