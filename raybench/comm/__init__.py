"""`raybench comm`: how fast the network between the ranks really is, operation by operation."""
