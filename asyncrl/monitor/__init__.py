"""What is shown and told of a run, live and at its end; fed by records."""
