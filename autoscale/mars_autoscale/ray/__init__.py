"""The policy that Ray Serve's controller calls."""
