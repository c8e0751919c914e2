"""The rules of `asyncrl.config.check`, a file for each subject; context.py is what they look at."""
