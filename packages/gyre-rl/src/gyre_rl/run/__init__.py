"""The ring: one run, from tasks to new weights and round again."""
