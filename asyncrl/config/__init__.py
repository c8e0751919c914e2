"""Configuration: `schema` says what may be set, `load` reads it, `check` refuses what cannot work."""
