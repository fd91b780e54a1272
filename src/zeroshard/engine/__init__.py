"""The engine of a step: units and their buckets, gathers and releases, gradients, reductions, and your optimizer."""
