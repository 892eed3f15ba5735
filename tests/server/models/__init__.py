"""Several models on one server."""
