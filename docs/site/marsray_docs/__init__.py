"""Generates the documentation site's references and figures, and reads the blocks of its pages."""
