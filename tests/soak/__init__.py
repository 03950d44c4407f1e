"""Random tensors, blocks, lookups and faults for as long as one likes, all content verified: `make soak`."""
