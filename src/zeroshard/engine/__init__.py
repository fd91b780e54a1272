"""The engine of a step: units and their buffers, gathers and releases, gradients, reductions, and your optimizer."""
