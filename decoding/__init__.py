"""Prompts in; ids, log-probs and mixing weights out."""
