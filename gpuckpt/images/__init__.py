"""The data plane: what an image consists of. Bytes only, no processes and no words for the person."""
