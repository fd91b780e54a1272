"""What runs each step: units and their buffers, gathers and releases, gradients and their reduction, your optimizer."""
