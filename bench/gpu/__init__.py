"""The parts of the acceptance run on a GPU; see `bench.gpu_acceptance`."""
