"""What a replica can do: step times and the measured frontier."""
