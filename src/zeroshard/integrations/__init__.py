"""Where zeroshard meets formats and tools that are not its own."""
