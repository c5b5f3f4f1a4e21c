"""The harness `shell`: a small multi-turn agent with tools, sub-agents and compaction."""
