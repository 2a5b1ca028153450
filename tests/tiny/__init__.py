"""The one set of tiny models, tokenizers and batches that all tests share."""
