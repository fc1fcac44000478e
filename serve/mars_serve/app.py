"""Re-exports the application under the ``import_path`` that Serve configs name."""

from mars_serve.deploy.app import application

__all__ = ["application"]
