"""Results as tables and a page, compared with a baseline."""
