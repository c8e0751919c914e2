"""Where records go beyond the run's own files."""
