"""The timeline of a run: its `trace/` as a file that Perfetto and Chrome open."""
