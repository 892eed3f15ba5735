"""Where bytes live: verified block records in memory, on disk and beyond. Knows nothing of MLX."""
