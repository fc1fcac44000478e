"""What audits of served outputs say about a frontier."""
