"""Configuration: `schema` says what may be set, `load` reads it, `check` refuses what cannot work.

reader.py and sources.py find and read files, interpolate.py resolves `${...}`, render.py writes
a configuration out again. Importing this loads no torch.
"""
