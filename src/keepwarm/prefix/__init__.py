"""What a prompt is: tokens, blocks and keys, and what can be used again. No MLX, no I/O."""
