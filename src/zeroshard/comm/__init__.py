"""Communication between ranks: data, agreement, and detection of lost ranks. The only room that knows of processes."""
