"""Plotly figures of runs, as plain dictionaries: one set for the page, the report and compare."""
