"""Task sets for Gyre: families of agent tasks with milestones."""
