"""What speaks HTTP: the APIs that agents already speak, and nothing that computes."""
