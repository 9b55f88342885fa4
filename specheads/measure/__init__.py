"""Clocks, figures with their intervals, and the tables and pages that show them."""
