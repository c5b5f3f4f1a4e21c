"""The processes of a run: how they are started, how they find one another and how they notice a death."""
