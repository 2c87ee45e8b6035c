"""What compiled programs tell about a step: cost, memory, collectives; and topologies."""
