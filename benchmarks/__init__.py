"""Measured figures beside their bars: each module prints a table, writes JSON and fails when one misses its bar."""
