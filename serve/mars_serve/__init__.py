"""Serving: request, scheduler, pages, forward, acceptance, stream; REST on Ray Serve on top."""
