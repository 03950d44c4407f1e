"""Stand-in, see the folder above."""
