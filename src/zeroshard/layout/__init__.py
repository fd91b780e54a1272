"""Which rank holds which elements: stages, the mesh, partitions, and where states rest. Pure: no torch."""
