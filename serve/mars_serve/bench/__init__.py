"""`marsray bench`: side-by-side benchmarks of decoding, and load tests of a server."""
