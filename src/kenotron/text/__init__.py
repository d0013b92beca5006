"""Documents and tokenizers: text to tokens. No torch."""
