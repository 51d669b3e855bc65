"""Rows of unequal length, rows made on first access, a masked categorical distribution and torch modes."""
