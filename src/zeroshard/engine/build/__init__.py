"""From a plain model to an engine: what is accepted, agreed, laid out, and rolled back on an exception."""
