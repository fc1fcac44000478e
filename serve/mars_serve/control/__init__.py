"""The governor: one actor for each application that holds the live τ and decides about replicas."""
