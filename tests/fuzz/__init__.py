"""Random small models through every backend: ``python -m tests.fuzz --help``.

``program``: models as text, made from a seed; ``grammar``: what they are made of; ``judge``: what is right; ``runs``:
one program through all backends; ``pool``: many of them, in processes that may crash; ``shrink``: less of one.
"""
