"""The training loop: the compiled step, checkpoints, metrics and ahead-of-time plans."""
