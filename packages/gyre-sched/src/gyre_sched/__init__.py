"""Elastic scheduler for RL on LLM agents: a pure state machine, a router, a simulator and a planner."""
