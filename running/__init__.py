"""What surrounds a step: settings, processes, folder, log, checkpoints, evaluation."""
