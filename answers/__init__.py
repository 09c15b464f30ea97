"""How answers are written, and when they are right. Loads no torch."""
