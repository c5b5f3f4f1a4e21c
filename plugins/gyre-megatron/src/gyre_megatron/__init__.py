"""Megatron-Core as a trainer of Gyre."""
