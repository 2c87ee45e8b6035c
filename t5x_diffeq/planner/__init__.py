"""What compiled programs say: cost, memory, collectives, topologies."""
