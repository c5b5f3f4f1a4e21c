"""`gyre dash`: a run as web pages while it goes on, from its event log and its trajectory store."""
