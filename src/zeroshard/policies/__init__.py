"""What users choose: communication, offload, and which settings do not go together."""
