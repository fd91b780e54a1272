"""Parameters: gathered, opened, guarded, edited, released, and sent once updated."""
