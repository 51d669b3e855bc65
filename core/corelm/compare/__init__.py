"""Two or more engines on the same prompts: how far apart their numbers are, and why."""
