"""`kvpipe bench store --chaos`: values in stores while servers and clients are killed at random."""
