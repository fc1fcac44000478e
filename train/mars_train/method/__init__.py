"""The MARS training method: layout of sequences, attention masks, objective and batches."""
