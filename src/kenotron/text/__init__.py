"""Read documents and tokenize them, without torch."""
