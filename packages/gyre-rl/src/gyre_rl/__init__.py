"""Online RL for long-running LLM agents on elastic cells: the ring and the gyre command."""
