"""vLLM as an engine of Gyre."""
