"""The policy: loaded, scored on what was sampled, stepped."""
