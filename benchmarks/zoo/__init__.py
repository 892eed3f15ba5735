"""The zoo: every model type of mlx-lm, tiny, whatever is warm against a cold run."""
