"""The speed of a replica: step times, and the measured frontier."""
