"""Handoffs that an engine consumes."""
