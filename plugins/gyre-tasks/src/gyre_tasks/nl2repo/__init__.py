"""NL2RepoBench: write a whole project from its description; the project's own tests decide."""
