"""The MARS training method: layout, attention masks, objective and batches."""
