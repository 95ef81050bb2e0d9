"""The command ``dbrq``."""
