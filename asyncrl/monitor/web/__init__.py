"""`asyncrl monitor --web`: runs as a page and as JSON, read from their folders."""
