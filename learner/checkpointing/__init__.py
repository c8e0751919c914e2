"""Checkpoints of the learner: what is in one, how it is written beside training, how it is read."""
