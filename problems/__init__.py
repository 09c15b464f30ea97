"""What is asked: problems, where they come from, and their prompts. Loads no torch."""
