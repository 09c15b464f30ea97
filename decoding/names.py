"""The names that settings have for what paths hear, and for how they are compared. Loads no torch."""

SIMILARITIES = ("distribution", "embedding", "mean")
CONTROLS = ("none", "scaled_mean", "noise", "strangers", "own")  # decoding/controls.py
