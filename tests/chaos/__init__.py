"""`python -m tests.chaos`: handoffs between engines that are killed, stopped, cut off, and lied to by their wires."""
