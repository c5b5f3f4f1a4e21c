"""Agent harnesses and sandboxes for Gyre."""
