"""What people look at: statistics, plots, the page of a run, the model card. Loads no torch."""
