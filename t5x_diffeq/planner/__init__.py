"""Cost, memory and collectives of a step, from its compiled program; and topologies."""
