"""asyncrl: an asynchronous actor-learner system for RL post-training of language models."""

__version__ = "0.1.0"
