"""What it costs in likelihood to keep K and V in fewer bits, and what it saves in bytes."""
