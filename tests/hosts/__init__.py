"""Two hosts on one machine: namespaces joined by cables."""
