"""Ray Serve's side of autoscaling."""
