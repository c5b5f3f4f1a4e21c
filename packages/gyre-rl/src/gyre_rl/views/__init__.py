"""Watching a run: its events, the state they fold to, the live view and the report. Views read and never steer."""
