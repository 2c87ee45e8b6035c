"""What compiled programs say: memory, FLOPs, collectives, time; and what steps really take."""
