"""Peers of dbrq, a family of variants for each process, since their thread pools clash. Run by ``compare.py``."""
