"""Keeps what belongs to keys on a disk or an object store: files, batches, stored responses."""
