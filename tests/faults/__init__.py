"""Peers that are killed or stopped at every stage, round after round: `make faults`, a few rounds in `make test`."""
