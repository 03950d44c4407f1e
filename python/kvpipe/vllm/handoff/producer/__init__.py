"""Handoffs that an engine produces."""
